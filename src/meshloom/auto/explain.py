"""A choice of strategies in words: where each input lies, how each large operation is split, what moves, what lies in memory."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from meshloom.auto.choices import WHOLE
from meshloom.auto.graph import Graph
from meshloom.auto.price import Move, Spec, reshard
from meshloom.auto.program import Value
from meshloom.auto.solve import Solved
from meshloom.plan.hlo import Found, total

SHORT = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float64": "f64",
    "int32": "i32",
    "uint32": "u32",
    "int8": "i8",
    "bool": "bool",
}

_NUMBER = re.compile(r"([._])\d+\b")
"""A number in a path: layers.3.up, Dense_12."""


class Line(NamedTuple):
    """Operations that are split alike.  count: how many, loops multiplied out.  moves: what each moves."""

    name: str
    split: str
    count: int
    moves: tuple[Move, ...]


class Plan(NamedTuple):
    """How a function is laid out, and what that is expected to cost on one device.

    inputs, results: path -> shape with its splits. operations: the large ones in their order, alike ones together. changes: values that change their
    layout on the way. total: (kind, mesh axes) -> (arrays, bytes), as `plan.hlo.total` counts them in a compiled program. seconds: of a call, without
    overlap. memory: bytes at the fullest moment, of `limit`. gap: how far the best choice may lie below, 0 if proven best. solved: seconds it took.
    notes: what a reader should know."""

    mesh: str
    machine: str
    inputs: dict[str, str]
    operations: tuple[Line, ...]
    changes: tuple[Line, ...]
    total: dict[tuple[str, tuple[str, ...]], tuple[int, int]]
    seconds: float
    memory: int
    limit: int
    gap: float
    solved: float
    notes: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all that moves, each array whole, on one device."""
        return sum(size for _, size in self.total.values())

    def __str__(self) -> str:
        alike = [(f"  {_times(len(names))}{name}", where) for (name, where), names in _alike(self.inputs.items()).items()]
        return "\n".join([*self.head(), *_columns(alike), *self.lines(True), *self.foot()])

    def explain(self) -> str:
        """All of it: every operation and every change of layout, not only those that multiply or move."""
        return "\n".join([*self.head(), *_columns([("  " + k, v) for k, v in self.inputs.items()]), *self.lines(False), *self.foot()])

    def head(self) -> list[str]:
        """The mesh and the machine."""
        return [f"mesh {self.mesh or 'of one device'} on {self.machine}", "inputs"]

    def lines(self, short: bool) -> list[str]:
        """Operations and changes of layout.  short: only those that multiply or move, and at most 40."""
        rows = []
        for title, lines in (("operations", self.operations), ("changes of layout", self.changes)):
            chosen = [l for l in lines if not short or l.moves or l.name.startswith(("dot_general", "conv"))]
            shown = chosen[:40] if short else chosen
            rows += [(title, "", "")] if shown else []
            rows += [(f"  {_times(l.count)}{l.name}", l.split, self.moved(l.moves)) for l in shown]
            rows += [(f"  and {len(chosen) - len(shown):,} more: print(step.explain())", "", "")] if len(chosen) > len(shown) else []
        return _columns(rows)

    def moved(self, moves: Iterable[Move]) -> str:
        """Collectives in words."""
        return "; ".join(f"{m.kind} over {' x '.join(self.axes[a] for a in m.axes)}, {m.bytes:,} B" for m in moves)

    def foot(self) -> list[str]:
        """What moves all together, time, memory, notes."""
        sums = [
            f"  {kind} over {' x '.join(axes)}, {count:,} array{'s' * (count > 1)}, {size:,} B"
            for (kind, axes), (count, size) in self.total.items()
        ]
        proven = "proven best" if self.gap <= 0 else f"at most {self.gap:.2%} from the best"
        return [
            "all together" if sums else "nothing moves",
            *sums,
            f"a call: {self.seconds * 1e3:,.3f} ms without overlap; {self.memory:,} B of {self.limit:,} B on a device",
            f"solved in {self.solved:.1f} s, {proven}",
            *self.notes,
        ]


def _times(count: int) -> str:
    return f"{count:,} x " if count > 1 else ""


def _alike(rows: Iterable[tuple]) -> dict[tuple, list[str]]:
    """Rows (a name, what is said of it) that differ in numbers of their names alone, together: a * stands for the numbers of several."""
    found: dict[tuple, list[str]] = {}
    for name, *rest in rows:
        found.setdefault((_NUMBER.sub(r"\1*", name), *rest), []).append(name)
    return {(name if len(set(names)) > 1 else names[0], *rest): names for (name, *rest), names in found.items()}


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows with their columns under each other."""
    wide = [max((len(r[i]) for r in rows if i < len(r) - 1 and any(r[1:])), default=0) for i in range(max(map(len, rows), default=0))]
    return ["  ".join(f"{cell:{w}}" for cell, w in zip(row, wide)).rstrip() for row in rows]


def shaped(value: Value, spec: Spec, axes: tuple[str, ...]) -> str:
    """A value's type and shape with its splits: f32[512, 4096/rows]."""
    one = lambda i, n: "/".join([str(n), *(a for a, d in zip(axes, spec) if d == i)])
    return f"{SHORT.get(value.dtype, value.dtype)}[{', '.join(one(i, n) for i, n in enumerate(value.shape))}]"


def lines_of(graph: Graph, choice: list[int], values: tuple[Value, ...], axes: tuple[str, ...]) -> tuple[Line, ...]:
    """Every operation with strategies of its own, alike ones together."""
    found: dict[tuple, int] = {}
    for node, k in zip(graph.nodes, choice):
        if node.step:
            into = [_split(spec, axes) for spec in node.wants[k]]
            out = [shaped(values[v], specs[k], axes) for v, specs in list(node.gives.items())[:1]]
            key = (node.name, f"{' x '.join(into)} -> {', '.join(out)}", tuple(node.moves[k]))
        elif node.moves[k]:
            value, specs = next(iter(node.gives.items()))
            key = (node.name, shaped(values[value], specs[k], axes), tuple(node.moves[k]))
        else:
            continue
        found[key] = found.get(key, 0) + round(node.times)
    return _lines(found)


def _lines(found: dict[tuple, int]) -> tuple[Line, ...]:
    """(name, split, moves) -> how often, as lines; layers alike together."""
    together = _alike(found)
    counts = {(_NUMBER.sub(r"\1*", name), *rest): 0 for name, *rest in found}
    for (name, *rest), count in found.items():
        counts[(_NUMBER.sub(r"\1*", name), *rest)] += count
    return tuple(Line(name, split, counts[_NUMBER.sub(r"\1*", name), split, moves], moves) for name, split, moves in together)


def _split(spec: Spec, axes: tuple[str, ...]) -> str:
    """Where an operand is split: axis 0 over rows."""
    said = [f"{d}/{a}" for a, d in zip(axes, spec) if d != WHOLE]
    return " ".join(said) or "whole"


def changes_of(
    graph: Graph, choice: list[int], values: tuple[Value, ...], mesh: tuple[int, ...], axes: tuple[str, ...]
) -> tuple[Line, ...]:
    """Every value that changes its layout between two nodes, alike ones together."""
    found: dict[tuple, int] = {}
    for e in graph.edges:
        have, want = e.have[choice[e.source]], e.want[choice[e.target]]
        if moves := reshard(have, want, e.bytes, mesh):
            value = values[e.value]
            name = graph.nodes[e.source].name if graph.nodes[e.source].kind == "input" else graph.nodes[e.source].kind
            key = (f"{name} for {graph.nodes[e.target].name}", f"{shaped(value, have, axes)} -> {shaped(value, want, axes)}", moves)
            found[key] = found.get(key, 0) + round(e.times)
    return _lines(found)


def summed(lines: Iterable[Line], axes: tuple[str, ...]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, mesh axes) -> (arrays, bytes) of all lines."""
    return total([Found(m.kind, tuple(axes[a] for a in m.axes), l.count, l.count, l.count * m.bytes, "") for l in lines for m in l.moves])


def notes_of(graph: Graph, captured: int, solved: Solved, gap: float, decided: int) -> tuple[str, ...]:
    """What a reader should know of a plan.  gap: that was good enough.  decided: classes of nodes."""
    notes = []
    if solved.gap > gap:
        notes.append(f"The search stopped early: this choice may cost up to {solved.gap:.1%} more than the best.")
    if graph.replicated:
        each = ", ".join(f"{name} ({count} x)" if count > 1 else name for name, count in sorted(graph.replicated.items()))
        notes.append(f"Without strategies, so whole on every device: {each}.")
    if captured:
        notes.append(
            f"The function closes over arrays of {captured:,} B, which lie whole on every device; pass them as arguments to split them."
        )
    if decided < len(graph.nodes):
        notes.append(f"{len(graph.nodes):,} operations and inputs in {decided:,} decisions: those with the same surroundings share one.")
    return tuple(notes)
