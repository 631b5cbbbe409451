"""What `meshloom verify` compares: a shrunken model, the layouts, the numbers of each, and the tables that show them.

It runs nothing itself; `recipes/verify.py` does.
"""

import itertools
import math
from typing import Any, NamedTuple

from meshloom.models.base import Model
from meshloom.parallel.table import STRATEGIES, devices, parse
from meshloom.plan.cost import Line
from meshloom.runner.run import stacks

LAYOUTS = (
    "data=8",
    "zero1=8",
    "zero2=8",
    "zero3=8",
    "zero1=2 zero3=4",
    "tensor=2",
    "tensor=4",
    "tensor=4 sequence",
    "tensor2d=2x2",
    "tensor3d=8",
    "context=2 ulysses=2",
    "zero3=4 tensor=2",
    "data=2 zero3=2 tensor=2",
    "pipe=2 zero1=2",
    "pipe=2:interleaved2 tensor=2",
)
"""Checked where nobody asks for others."""
EXPERTS = ("expert=4", "expert=2:folded tensor=2")
"""Checked besides where the model has experts."""
SEQ = 32
"""Tokens in a row of the check."""
NEAR = {"loss": 1e-5, "gradient": 1e-5, "norm": 1e-5, "weights": 1e-4}
"""Largest relative difference from one device that counts as equal: loss and norm of every step, the first gradient (its worst element in any
tensor), the weights after the last step (L2 norm, worst tensor). Sums in another order differ by about 1e-6 in fp32, and an optimizer that
divides by its own root mean square makes more of it."""


def shrink(model: Model, c: Any, least: int = 1) -> Any:
    """A small copy of a model with what makes it odd: its family and options, the ratio of its heads, the remainders of its sizes by powers of
    two and of its vocabulary by the padding. Layers: two of every repeated unit where there are so many, and `least` of one unit in any case."""
    unit = stacks(model.kinds(c))
    size = len(unit[0].unit)
    layers = c.layers if len(unit) > 1 else max(min(c.layers, 2 * size), -(-least // size) * size)
    layers = min(layers, max(12, least))
    heads, kv_heads = _heads(c.heads, c.kv_heads)
    head = next(n for n in (8, 16, 32, c.head) if n >= c.head or _turns(c, n))
    sizes = dict(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head=min(head, c.head),
        embed=_small(c.embed, 32),
        ffn=_small(c.ffn, 48),
        vocab=(c.vocab - 1) % c.vocab_multiple + 1 + c.vocab_multiple if c.vocab > 2 * c.vocab_multiple else c.vocab,
        max_seq=min(c.max_seq, 2 * SEQ),
    )
    given = c.model_dump()
    if given.get("experts"):
        sizes.update(_experts(c))
    if given.get("key_rank"):
        sizes.update(
            nope_head=min(c.nope_head, 8), rope_head=min(c.rope_head, 4), value_head=min(c.value_head, 8), key_rank=min(c.key_rank, 20)
        )
        sizes.update(query_rank=c.query_rank and min(c.query_rank, 12), first_dense=min(c.first_dense, layers - 1))
    if given.get("window"):
        sizes["window"] = min(given["window"], SEQ // 4 - 1)
    for name in ("windowed_layers", "rotary_layers", "moe_layers"):
        if given.get(name):
            sizes[name] = (given[name] * layers)[:layers]
    return type(c)(**{**given, **sizes})


def _experts(c: Any) -> dict[str, int]:
    """Sizes of a smaller mixture: as many experts as groups and choices need, with the same remainders by powers of two up to 8."""
    least = max(4, c.top, c.groups * max(2, -(-c.top // c.top_groups)))
    unit = math.lcm(math.gcd(c.experts, 8), c.groups)
    few = next(n for n in itertools.count(unit, 2 * unit) if n >= least)
    return {"experts": min(few, c.experts), "expert_ffn": _small(c.expert_ffn, 24)}


def _turns(c: Any, head: int) -> bool:
    """Whether the rotated part of a head of this width is a positive even number of features."""
    rope = getattr(c, "rope", None)
    turned = int(head * rope.partial) if rope else 2
    return turned >= 2 and turned % 2 == 0


def _heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """The fewest heads with the same ratio, of which the same numbers of devices up to 8 hold equal shares, for queries and for keys."""
    ratio = heads // kv_heads
    same = lambda n: all((n % d == 0) == (kv_heads % d == 0) and (n * ratio % d == 0) == (heads % d == 0) for d in (2, 4, 8))
    few = next((n for n in range(1, kv_heads) if same(n)), kv_heads)
    return few * ratio, few


def _small(size: int, least: int) -> int:
    """The smallest size from `least` on with the same greatest power of two up to 64, and odd otherwise like it."""
    power = math.gcd(size, 64)
    odd = next(n for n in range(1, 2 * least + 2, 2) if power * n >= least)
    return min(size, power * odd)


def default_layouts(c: Any) -> tuple[str, ...]:
    """What is checked of a model where nobody asks for layouts."""
    return LAYOUTS + EXPERTS * bool(getattr(c, "experts", 0))


class Stored(NamedTuple):
    """Bytes that one device keeps between steps, of one kind (params, optimizer, average): counted on the arrays, and by formula."""

    kind: str
    found: int
    formula: int


def limits(spelling: str) -> dict[str, float]:
    """The largest differences that count as equal under a layout: NEAR, and what its options may add."""
    options = [STRATEGIES[name].apart.get(option, {}) for name, asked in parse(spelling).items() for option in asked.options]
    return {name: near + sum(apart.get(name, 0) for apart in options) for name, near in NEAR.items()}


class Row(NamedTuple):
    """One layout against one device.

    differences: name in NEAR -> largest relative difference. worst: the tensor whose gradient differs most. start: whether the starting weights
    are equal bit for bit. replicas: whether what several devices hold is equal on all of them, bit for bit, after the last step.
    refused: why the model does not admit the layout; then nothing else is known. memory: bytes that a step needs of a device, by the compiler and as
    predicted (plan/memory.py), which is fitted to larger models: shown, and not compared.
    """

    spelling: str
    differences: dict[str, float]
    worst: str
    start: bool
    replicas: bool
    stored: tuple[Stored, ...]
    moved: tuple[Line, ...]
    refused: str = ""
    memory: tuple[int, int] = (0, 0)

    @property
    def wrong(self) -> list[str]:
        """What disagrees, in words."""
        near = limits(self.spelling)
        found = [f"{name} differs by {d:.1e}" for name, d in self.differences.items() if not d <= near[name]]
        found += [] if self.start else ["starting weights differ"]
        found += [] if self.replicas else ["devices hold different copies"]
        found += [f"{s.kind}: {s.found:,} bytes stored, formula {s.formula:,}" for s in self.stored if s.found != s.formula]
        found += [_unequal(line) for line in self.moved if not line.equal]
        return [] if self.refused else found


def _unequal(line: Line) -> str:
    over = " x ".join(line.axes)
    return f"{line.kind} over {over}: {line.found[0]} arrays, {line.found[1]:,} bytes; formula {line.formula[0]}, {line.formula[1]:,}"


def refused(spelling: str, why: str) -> Row:
    """The row of a layout that the model does not admit."""
    return Row(spelling, {}, "", True, True, (), (), why)


def needs_devices(layouts: tuple[str, ...]) -> int:
    """Devices that the largest of the layouts takes; of LAYOUTS where none are given."""
    return max(devices(s) for s in layouts or LAYOUTS)


def tables(rows: list[Row], steps: int) -> list[Any]:
    """What a person reads: equality and memory of each layout, then the collectives of each, as tables for rich."""
    from rich.table import Table

    equal = Table(title=f"Against one device, {steps} steps", title_justify="left")
    for name in ("layout", "loss", "gradient", "norm", "weights", "stored a device", "needs (predicted)", "moved a step", ""):
        equal.add_column(name, justify="left" if name in ("layout", "") else "right")
    for row in rows:
        if row.refused:
            equal.add_row(row.spelling, *["-"] * 7, "refused")
            continue
        near = limits(row.spelling)
        marks = [_mark(f"{d:.1e}", d <= limit) if (d := row.differences.get(name)) is not None else "-" for name, limit in near.items()]
        stored, arrays, size = sum(s.found for s in row.stored), sum(x.found[0] for x in row.moved), sum(x.found[1] for x in row.moved)
        ok = all(s.found == s.formula for s in row.stored), all(x.equal for x in row.moved)
        moved = _mark(f"{arrays} arrays, {size:,} B", ok[1])
        needs = f"{row.memory[0] / 1e6:.2f} ({row.memory[1] / 1e6:.2f}) MB"
        equal.add_row(row.spelling, *marks, _mark(f"{stored:,} B", ok[0]), needs, moved, _verdict(row))
    return [equal, _moved(rows)]


def _verdict(row: Row) -> str:
    """The last column: equal, within the bounds that its options state, or not."""
    if row.wrong:
        return "[red]differs[/]"
    return "[green]equal[/]" if limits(row.spelling) == NEAR else "[green]within bounds[/]"


def _moved(rows: list[Row]) -> Any:
    """The collectives of every layout, program and formula side by side."""
    from rich.table import Table

    table = Table(title="Collectives of the compiled step, and by formula", title_justify="left")
    for name in ("layout", "kind", "over", "arrays", "formula", "bytes", "formula"):
        table.add_column(name, justify="left" if name in ("layout", "kind", "over") else "right")
    for row in rows:
        for i, line in enumerate(row.moved):
            count, size = (_mark(f"{line.found[j]:,}", line.found[j] == line.formula[j]) for j in (0, 1))
            first = row.spelling if i == 0 else ""
            table.add_row(first, line.kind, " x ".join(line.axes), count, f"{line.formula[0]:,}", size, f"{line.formula[1]:,}")
        if row.moved:
            table.add_section()
    return table


def _mark(text: str, good: bool) -> str:
    return text if good else f"[red]{text}[/]"
