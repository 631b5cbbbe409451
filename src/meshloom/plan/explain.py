"""The plan of a run before anything is allocated: shapes, layout, bytes on each device, operations and traffic of a step."""

import io
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from meshloom.core.layout import Layout
from meshloom.core.spec import count, is_spec, trained
from meshloom.core.tree import Tree, named_leaves
from meshloom.models.base import Model
from meshloom.parallel.base import Asked, Collective, Shapes, wherever
from meshloom.parallel.table import STRATEGIES, parse, spell
from meshloom.plan.cost import shapes, wire_bytes
from meshloom.plan.flops import train_flops
from meshloom.plan.memory import stored, working
from meshloom.plan.plan import Plan
from meshloom.plan.stages import Pipeline, pipeline


class Array(NamedTuple):
    """One parameter: its whole shape, one device's between steps, and its fp32 bytes there."""

    path: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    bytes: int


class Explained(NamedTuple):
    """A plan in numbers, all from specs.

    active: parameters that one token goes through. trained: parameters that are not frozen.
    stored: kind -> bytes a device keeps between steps, exact. working: kind -> bytes that a step adds, an estimate. flops: of a step, all devices,
    model FLOPs (recomputed work is not counted). moved: the collectives of a step of each phase; one phase without a name where all steps are alike.
    pipeline: None where there is none.
    """

    title: str
    parameters: int
    active: int
    trained: int
    layout: tuple[tuple[str, str], ...]
    how: str
    arrays: tuple[Array, ...]
    stored: dict[str, int]
    working: dict[str, int]
    tokens: int
    flops: float
    devices: int
    moved: dict[str, tuple[tuple[Collective, float], ...]]
    pipeline: Pipeline | None = None


class Kept(NamedTuple):
    """What a way of training keeps and moves. stored: kind -> specs of what is stored between steps beside the parameters (optimizer, average).
    layout: that places these. moves: phase -> (spelling, shapes) -> the collectives of a step."""

    stored: Mapping[str, Tree]
    layout: Layout
    moves: Mapping[str, Callable[[str, Shapes], tuple[Collective, ...]]]


def explain(model: Model, c: Any, spelling: str, plan: Plan, seq: int, sequences: int, kept: Kept) -> Explained:
    """The numbers of a plan; makes no array.  spelling: of the layout.  seq, sequences: of one step.
    Raises ValueError where the batch or a size does not divide."""
    lay, specs = plan.layout, model.specs(c)
    x = shapes(model, c, lay, seq, sequences, plan.micro, plan.how, plan.dtype, plan.packed)
    names = parse("" if spelling == "one device" else spelling)
    arrays = tuple(
        Array(path, s.axes, s.shape, lay.shard_shape("rest", s), lay.shard_bytes("rest", s, jnp.dtype(s.dtype).itemsize))
        for path, s in named_leaves(specs, is_spec).items()
    )
    asked = "" if spelling == "one device" else spelling
    moved = {phase: tuple((m, wire_bytes(m, lay)) for m in wherever(cost(asked, x))) for phase, cost in kept.moves.items()}
    tokens, pipe = sequences * seq, pipeline(model, x)
    return Explained(
        title=f"{model.name}: {c.layers} layers, embed {c.embed}, {c.heads} heads ({c.kv_heads} for keys), ffn {c.ffn}, vocabulary {c.vocab}",
        parameters=count(specs),
        active=round(sum(math.prod(s.used) * model.active(c, s) for s in named_leaves(specs, is_spec).values())),
        trained=count(trained(specs, specs)),
        layout=tuple((spell({n: a}), _does(n, a)) for n, a in names.items() if a.devices > 1),
        how=f"{plan.how.runner}, remat {plan.how.remat}, {plan.dtype}, {sequences} sequences of {seq} tokens in {plan.micro} micro-batch{'es' * (plan.micro > 1)}",
        arrays=arrays,
        stored={"parameters": stored(lay, specs), **{kind: stored(kept.layout, tree) for kind, tree in kept.stored.items()}},
        working=working(model, x, pipe and pipe.flight),
        tokens=tokens,
        flops=train_flops(model, c, seq) * tokens,
        devices=lay.devices,
        moved=moved,
        pipeline=pipe,
    )


def _does(name: str, asked: Asked) -> str:
    """What a strategy does, and each of its options."""
    return "; ".join(STRATEGIES[name].does(asked.options))


def brief(e: Explained) -> list[str]:
    """What a run says before it starts: a few lines."""
    layout = " x ".join(name for name, _ in e.layout) or "one device"
    active = f", {e.active:,} of them for a token" if e.active != e.parameters else ""
    active += f", {e.trained:,} of them train ({e.trained / e.parameters:.2%})" if e.trained != e.parameters else ""
    here, step = sum(e.stored.values()), sum(e.working.values())
    sent = ", ".join(size(sum(n for _, n in moved)) + (f" ({phase})" if phase else "") for phase, moved in e.moved.items())
    whole = unsplit(e)
    return [
        f"model      {e.title}; {e.parameters:,} parameters{active}",
        f"layout     {layout}; {e.how}",
        f"memory     {size(here)} kept a device ({', '.join(f'{kind} {size(n)}' for kind, n in e.stored.items())}), about {size(step)} more in a step",
        f"step       {e.tokens:,} tokens, {number(e.flops)}FLOP, {sent} sent by each device",
        *([f"pipeline   {e.pipeline.said}"] if e.pipeline else []),
        *([f"not split  {whole}"] if whole else []),
    ]


def fits(e: Explained, memory: int, on: str) -> str:
    """Whether a step fits a device of so many bytes, in a line; where it does not, by how much, and what takes most.  on: what the device is called."""
    kinds = {**e.stored, **e.working}
    needs, most = sum(kinds.values()), max(kinds, key=lambda kind: kinds[kind])
    if needs <= memory:
        return f"fits       about {size(needs)} of the {size(memory)} of a device of {on}"
    return (
        f"too large  a step takes about {size(needs)} of a device, {size(needs - memory)} more than the {size(memory)} of a device of {on}; "
        f"most of it is {most}: {size(kinds[most])}. Use remat, smaller micro-batches, or a layout that splits more."
    )


SHARE = 0.01
"""Part of the parameters that a device keeps from which on those that nothing splits are named."""


def unsplit(e: Explained, names: int = 6) -> str:
    """The parameters that a layout which splits others leaves whole on every device, largest first; "" where they are less than SHARE of what a
    device keeps of parameters."""
    whole = sorted((a for a in e.arrays if a.shard == a.shape), key=lambda a: -a.bytes)
    held, total = sum(a.bytes for a in whole), sum(a.bytes for a in e.arrays)
    if len(whole) == len(e.arrays) or held < SHARE * total:
        return ""
    more = f" and {len(whole) - names} more" if len(whole) > names else ""
    said = ", ".join(a.path for a in whole[:names])
    return f"{said}{more}: {size(held)} in all, {held / total:.0%} of the parameters that a device keeps"


def lines(e: Explained, width: int = 140) -> list[str]:
    """The whole plan as text, for `--dry-run`."""
    from rich.console import Console

    out = Console(file=io.StringIO(), width=width)
    for line in brief(e):
        out.print(line, soft_wrap=True, highlight=False)
    for name, summary in e.layout:
        out.print(f"           {name}: {summary}", soft_wrap=True, highlight=False)
    for table in (
        _arrays(e),
        *([_stages(e.pipeline)] if e.pipeline else []),
        _memory(e),
        *(_moved(phase, moved) for phase, moved in e.moved.items()),
    ):
        out.print(table)
    return out.file.getvalue().rstrip("\n").split("\n")  # pyright: ignore[reportAttributeAccessIssue]


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _arrays(e: Explained) -> Any:
    table = _table("Parameters between steps", ("array", "axes"), ("whole", "on a device", "bytes on a device"))
    for a in e.arrays:
        table.add_row(a.path, " ".join(a.axes), _shape(a.shape), _shape(a.shard), f"{a.bytes:,}")
    return table


def _stages(p: Pipeline) -> Any:
    """What each stage runs, and what its device has in flight, every place of it."""
    table = _table("Stages of the pipeline", ("stage", "holds"), ("kept or on its way", "places", "bytes of each"))
    rows = [(str(at), p.stage(at)) for at in range(len(p.layers))]
    rings = [(ring.holds, f"{ring.places} + 1", f"{ring.each:,}") for ring in p.flight.rings.values()]
    for left, right in itertools.zip_longest(rows, rings):
        table.add_row(*(left or ("", "")), *(right or ("", "", "")))
    return table


def _memory(e: Explained) -> Any:
    table = _table("Memory of a device", ("kind", ""), ("bytes",))
    for kind, n in e.stored.items():
        table.add_row(kind, "kept between steps", f"{n:,}")
    for kind, n in e.working.items():
        table.add_row(kind, "in a step, estimate", f"{n:,}")
    return table


def _moved(phase: str, moved: tuple[tuple[Collective, float], ...]) -> Any:
    table = _table(
        "Traffic of a step" + (f" of phase '{phase}'" if phase else ""), ("kind", "over", "why"), ("arrays", "bytes", "sent by a device")
    )
    for c, sent in moved:
        table.add_row(c.kind, " x ".join(c.axes), c.why, f"{c.count:,}", f"{c.bytes:,}", f"{math.ceil(sent):,}")
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)


def size(n: float) -> str:
    """Bytes for people: 1,572,864 -> "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def number(n: float) -> str:
    """A count with its prefix: 3.2e12 -> "3.20 T"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if n < 1000:
            return f"{n:.2f} {prefix}"
        n /= 1000
    return f"{n:.2f} E"
