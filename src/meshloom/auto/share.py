"""Values that several operations take in another layout than they have: moved once for those that stand close, anew for those far away.

A compiler moves a value once for all who ask for the same layout, and keeps the copy from the first to the last of them. So operations that stand close
share a copy here too; between those far apart a copy would lie in memory for long (a parameter from its forward use to its backward one), so they
get copies of their own, and the program says so with a barrier."""

from bisect import bisect
from itertools import groupby

from meshloom.auto.graph import Edge, Node
from meshloom.auto.price import Spec

NEAR = 12
"""Operations with strategies of their own between two uses of a value, up to which they share a copy."""


def share(nodes: list[Node], edges: list[Edge]) -> tuple[list[Edge], dict[tuple, tuple[int, int]]]:
    """The edges, those of one visit led over a new node: the copy, in one of the layouts that its users want; and (step, operand) -> (value, number
    of the visit), of the visits of a value after its first.  Adds to `nodes`."""
    found: list[Edge] = []
    again: dict[tuple, tuple[int, int]] = {}
    seen: dict[int, int] = {}
    for visit in visits(nodes, edges):
        ref = visit[0].ref
        seen[ref] = seen.get(ref, -1) + usual(visit[0])
        again |= {e.at: (ref, seen[ref]) for e in visit if seen[ref] > 0 and usual(e)}
        if len({e.target for e in visit}) == 1:
            found += visit
            continue
        first = visit[0]
        layouts = tuple(dict.fromkeys(s for e in visit for s in e.want))
        n = len(layouts)
        depth = max(nodes[e.target].depth for e in visit)
        nodes.append(
            Node(
                nodes[first.target].name,
                "copy",
                [0.0] * n,
                [()] * n,
                [()] * n,
                {},
                first.times,
                depth,
                signs=[f"copy {first.bytes} {layouts}"],
            )
        )
        at, until = len(nodes) - 1, max(e.span[1] for e in visit)
        span = (min(e.span[0] for e in visit), until)
        found.append(first._replace(target=at, want=layouts, taken=layouts, at=("copy", at), span=span))
        found += [e._replace(source=at, have=layouts) for e in visit]
    return found, again


def visits(nodes: list[Node], edges: list[Edge]) -> list[list[Edge]]:
    """Edges in groups: uses of one value, as often as each other, that stand close together. Where a loop takes something back, and results, are alone."""
    steps = sorted({n.step for n in nodes if n.step})
    place = lambda e: bisect(steps, e.at[0])
    alone = [[e] for e in edges if not usual(e)]
    found: list[list[Edge]] = []
    key = lambda e: (e.ref, e.times)
    for _, uses in groupby(sorted(filter(usual, edges), key=lambda e: (*key(e), place(e))), key):
        group: list[Edge] = []
        for e in uses:
            if group and place(e) - place(group[-1]) > NEAR:
                found.append(group)
                group = []
            group.append(e)
        found.append(group)
    return found + alone


def usual(e: Edge) -> bool:
    """Whether an edge is an operand of an operation, and no broadcast."""
    return len(e.at) == 2 and isinstance(e.at[0], int) and e.want == e.taken


def through(edges: list[Edge], choice: list[int]) -> dict[tuple, Spec]:
    """(step, operand) -> the layout of the copy that it is taken from."""
    copies = {e.target: e.want[choice[e.target]] for e in edges if e.at[0] == "copy"}
    return {e.at: copies[e.source] for e in edges if e.source in copies}
