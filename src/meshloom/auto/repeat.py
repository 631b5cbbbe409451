"""Layers that repeat: nodes whose surroundings look the same share one decision, so that a deep model is not larger than a shallow one."""

from meshloom.auto.graph import Graph

ROUNDS = 3
"""How far a node looks around, in edges."""


def classes(graph: Graph, rounds: int = ROUNDS) -> list[int]:
    """For every node the number of its class: those in one class have the same strategies, the same followers, and within `rounds` edges the same
    neighbours.  Source: colour refinement (Weisfeiler and Leman 1968)."""
    colours = [hash((tuple(n.signs), n.times, tuple(n.wants), tuple(n.gives.values()))) for n in graph.nodes]
    takes: list[list] = [[] for _ in graph.nodes]
    gives: list[list] = [[] for _ in graph.nodes]
    for e in graph.edges:
        look = hash((e.have, e.want, e.bytes, e.times))
        takes[e.target].append((e.source, look))
        gives[e.source].append((e.target, look))
    for _ in range(rounds):
        colours = [hash((c, _seen(takes[i], colours), _seen(gives[i], colours))) for i, c in enumerate(colours)]
    number: dict[int, int] = {}
    return [number.setdefault(c, len(number)) for c in colours]


def _seen(rows: list[tuple[int, int]], colours: list[int]) -> tuple:
    """What a node sees along some edges, in no order."""
    return tuple(sorted((colours[i], look) for i, look in rows))


def alone(graph: Graph) -> list[int]:
    """Every node in a class of its own."""
    return list(range(len(graph.nodes)))
