"""A program as a graph to choose in: nodes with strategies, edges where a value may have to change its layout, values with lifetimes."""

import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from meshloom.auto.choices import WHOLE, Letters
from meshloom.auto.price import Move, Rates, Spec, divides, nested, parts

Moves = tuple[Move, ...]


@dataclass
class Node:
    """An operation with those that follow it, or an input, or what a loop carries.

    seconds, moves: of every strategy. wants: of every strategy, the layouts of the operands. gives: value -> its layout under every strategy.
    times: how often it runs. depth: how many nodes of operations lie before it, at most. step: the number of its step, 0 for an input."""

    name: str
    kind: str
    seconds: list[float]
    moves: list[Moves]
    wants: list[tuple[Spec, ...]]
    gives: dict[int, tuple[Spec, ...]]
    times: float
    depth: int
    step: int = 0
    signs: list[str] = field(default_factory=list)
    """What makes it like another: its operation and shapes, and those of its followers."""

    def add(self, choice: int, seconds: float, moves: Moves) -> None:
        """Adds to what one strategy costs, in one run."""
        self.seconds[choice] += seconds * self.times
        self.moves[choice] += moves


class Edge(NamedTuple):
    """A value that a node takes from another.

    ref: the value as the operation names it: the same, or a broadcast, or another name. have: its layout under every strategy of the source; want:
    under every one of the target. at: (step, operand) where it is taken; taken: the layouts of that operand, which may be a broadcast. span: from when
    to when a copy in another layout lives."""

    value: int
    ref: int
    source: int
    have: tuple[Spec, ...]
    target: int
    want: tuple[Spec, ...]
    bytes: int
    times: float
    at: tuple
    taken: tuple[Spec, ...]
    span: tuple[int, int]


class Held(NamedTuple):
    """A value that lies in memory from `born` until before `end`."""

    value: int
    node: int
    bytes: int
    born: int
    end: int


class Graph(NamedTuple):
    """All that a choice is made in.  replicated: primitive -> how often it is, of those that have no strategies but whole.
    again: (step, operand) -> (value, number of the visit), where a value is moved anew (share.py)."""

    nodes: list[Node]
    edges: list[Edge]
    held: list[Held]
    clock: int
    replicated: dict[str, int]
    again: dict[tuple, tuple[int, int]]


class Strategy(NamedTuple):
    """One way to split an operation: layouts of operands and results, what it moves, over how many devices its work is shared."""

    wants: tuple[Spec, ...]
    gives: tuple[Spec, ...]
    moves: Moves
    shared: int


def strategies(rule: Letters, sizes: list[int], shapes: list[tuple[int, ...]], rates: Rates) -> list[Strategy]:
    """Every strategy of an operation: each mesh axis over one letter or none; along a summed letter the parts of the sum are added on all devices
    (all-reduce) or to where an axis of the result is split (reduce-scatter).  sizes, shapes: of the results."""
    mesh = rates.mesh
    found: dict[tuple, Strategy] = {}
    free = [i for i, n in enumerate(rule.sizes) if n > 1]
    for taken in itertools.product([WHOLE, *free], repeat=len(mesh)):
        if not divides(taken, rule.sizes, mesh):
            continue
        wants = tuple(tuple(ins.index(a) if a in ins and a != WHOLE else WHOLE for a in taken) for ins in rule.ins)
        plain = [tuple(outs.index(a) if a in outs and a != WHOLE else WHOLE for a in taken) for outs in rule.outs]
        added = [x for x, a in enumerate(taken) if a in rule.summed]
        axes = range(-1, len(shapes[0])) if len(shapes) == 1 else (WHOLE,)
        for places in itertools.product(axes, repeat=len(added)):
            where = dict(zip(added, places))
            gives = tuple(tuple(where.get(x, d) for x, d in enumerate(out)) for out in plain)
            inside = any(d != WHOLE and nested(x, d, plain[0]) for x, d in where.items())
            if not inside and all(divides(g, s, mesh) for g, s in zip(gives, shapes)):
                moves = _summed(where, plain, sizes, mesh)
                one = Strategy(wants, gives, moves, math.prod(n for n, a in zip(mesh, taken) if a != WHOLE))
                old = found.get((wants, gives))
                if old is None or one.shared > old.shared:
                    found[wants, gives] = one
    return list(found.values())


def _summed(where: dict[int, int], plain: list[Spec], sizes: list[int], mesh: tuple[int, ...]) -> Moves:
    """What adds up the parts of the results.  where: mesh axis -> the axis of the result that it splits then, or WHOLE."""
    moves: list[Move] = []
    now = list(plain[0])
    for x, d in where.items():
        if d != WHOLE and mesh[x] > 1:
            moves.append(Move("reduce-scatter", (x,), sizes[0] // parts(tuple(now), mesh)))
            now[x] = d
    axes = tuple(x for x, d in where.items() if d == WHOLE and mesh[x] > 1)
    if axes:
        given = [tuple(now), *plain[1:]]
        moves += [Move("all-reduce", axes, size // parts(g, mesh)) for g, size in zip(given, sizes)]
    return tuple(moves)


class Followed(NamedTuple):
    """What an operation does that follows an operand: the other operands' layouts, the results', and what it moves."""

    wants: tuple[Spec, ...]
    gives: tuple[Spec, ...]
    moves: Moves


def follow(rule: Letters, lead: int, spec: Spec, lead_bytes: int, sizes: list[int], mesh: tuple[int, ...]) -> Followed:
    """An operation under the layout that its operand `lead` has.  What it cannot keep split is gathered first; sums are added up everywhere."""
    taken = [rule.ins[lead][d] if d != WHOLE else WHOLE for d in spec]
    for letter in set(taken) - {WHOLE}:
        while rule.sizes[letter] % math.prod(n for n, a in zip(mesh, taken) if a == letter):
            taken[len(taken) - 1 - taken[::-1].index(letter)] = WHOLE
    kept = tuple(d if a != WHOLE else WHOLE for d, a in zip(spec, taken))
    lost = tuple(x for x, (d, a) in enumerate(zip(spec, taken)) if d != WHOLE and a == WHOLE and mesh[x] > 1)
    moves = [Move("all-gather", lost, lead_bytes // parts(kept, mesh))] if lost else []
    at = lambda names: tuple(names.index(a) if a != WHOLE and a in names else WHOLE for a in taken)
    gives = tuple(at(outs) for outs in rule.outs)
    axes = tuple(x for x, a in enumerate(taken) if a in rule.summed and mesh[x] > 1)
    if axes:
        moves += [Move("all-reduce", axes, size // parts(g, mesh)) for g, size in zip(gives, sizes)]
    return Followed(tuple(at(ins) for ins in rule.ins), gives, tuple(moves))
