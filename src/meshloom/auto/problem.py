"""The choice as numbers: for every class of nodes the seconds of its strategies, for every pair the seconds between them, and memory over time."""

import itertools
from typing import NamedTuple

import numpy as np

from meshloom.auto.graph import Graph
from meshloom.auto.price import Rates, Spec, parts, reshard


class Link(NamedTuple):
    """Two classes that pass values.  rows, columns: of every strategy of the first and of the second, its row and column in `seconds` (all such
    values together) and in `bytes` (the copy that one such value needs)."""

    first: int
    second: int
    rows: np.ndarray
    columns: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray


class Row(NamedTuple):
    """Memory at one time: bytes of every strategy of some classes, and how many copies of some links."""

    nodes: dict[int, np.ndarray]
    links: dict[int, int]


class Problem(NamedTuple):
    """seconds: of every strategy of every class.  rows: memory at the times that matter; each has to stay within the limit."""

    seconds: list[np.ndarray]
    links: list[Link]
    rows: list[Row]


class Times(NamedTuple):
    """Memory over the whole program.  held: (class, bytes of its strategies, from, until) of every value; copies: (link, from, until)."""

    clock: int
    held: list[tuple[int, np.ndarray, int, int]]
    copies: list[tuple[int, int, int]]

    def over(self, choice: list[int], links: list[Link]) -> np.ndarray:
        """Bytes at every time under a choice."""
        change = np.zeros(self.clock + 3)
        for node, sizes, born, end in self.held:
            change[born] += sizes[choice[node]]
            change[end] -= sizes[choice[node]]
        for at, born, end in self.copies:
            link = links[at]
            size = link.bytes[link.rows[choice[link.first]], link.columns[choice[link.second]]]
            change[born] += size
            change[end] -= size
        return np.cumsum(change)

    def row(self, when: int) -> Row:
        """The memory at one time, as a row of the problem."""
        nodes: dict[int, np.ndarray] = {}
        links: dict[int, int] = {}
        for node, sizes, born, end in self.held:
            if born <= when < end:
                nodes[node] = nodes[node] + sizes if node in nodes else sizes
        for at, born, end in self.copies:
            if born <= when < end:
                links[at] = links.get(at, 0) + 1
        return Row(nodes, links)


def pose(graph: Graph, classes: list[int], rates: Rates) -> tuple[Problem, Times]:
    """The problem of a graph whose nodes of one class decide together, with no row of memory yet; and its memory over time."""
    count = max(classes, default=-1) + 1
    seconds: list[np.ndarray] = [np.zeros(0)] * count
    for c, node in zip(classes, graph.nodes):
        own = np.asarray(node.seconds)
        seconds[c] = seconds[c] + own if len(seconds[c]) else own
    links: list[Link] = []
    known: dict[tuple, int] = {}
    copies: list[tuple[int, int, int]] = []
    tables: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    for e in graph.edges:
        key = (classes[e.source], classes[e.target], e.have, e.want, e.bytes)
        shape = (tuple(dict.fromkeys(e.have)), tuple(dict.fromkeys(e.want)), e.bytes)
        if shape not in tables:
            tables[shape] = _table(*shape, rates)
        if key not in known:
            known[key] = len(links)
            links.append(_link(*key[:4], tables[shape][1]))
        at = known[key]
        links[at].seconds[...] += tables[shape][0] * e.times
        if links[at].bytes.any():
            copies.append((at, *e.span))
    mesh = rates.mesh
    sizes: dict[tuple, np.ndarray] = {}
    held = []
    for h in graph.held:
        key = (h.bytes, graph.nodes[h.node].gives[h.value])
        if key not in sizes:
            sizes[key] = np.array([h.bytes / parts(s, mesh) for s in key[1]])
        held.append((classes[h.node], sizes[key], h.born, h.end))
    return Problem(seconds, links, []), Times(graph.clock, held, copies)


def _link(first: int, second: int, have: tuple, want: tuple, copied: np.ndarray) -> Link:
    """A link without its seconds.  copied: bytes of the copy for each layout that there is and each that is wanted."""
    rows, columns = ({s: i for i, s in enumerate(dict.fromkeys(specs))} for specs in (have, want))
    return Link(first, second, np.array([rows[s] for s in have]), np.array([columns[s] for s in want]), np.zeros(copied.shape), copied)


def _table(rows: tuple[Spec, ...], columns: tuple[Spec, ...], size: int, rates: Rates) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and bytes of the copy, for each layout that there is and each that is wanted."""
    seconds, copied = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
    for (i, h), (j, w) in itertools.product(enumerate(rows), enumerate(columns)):
        moves = reshard(h, w, size, rates.mesh)
        if moves:
            seconds[i, j] = sum(map(rates.moved, moves))
            copied[i, j] = size / parts(w, rates.mesh)
    return seconds, copied


def cost(problem: Problem, choice: list[int]) -> float:
    """Seconds of a choice."""
    own = sum(float(s[k]) for s, k in zip(problem.seconds, choice))
    return own + sum(float(l.seconds[l.rows[choice[l.first]], l.columns[choice[l.second]]]) for l in problem.links)


def memory(problem: Problem, choice: list[int]) -> float:
    """The most bytes of all rows under a choice."""

    def one(row: Row) -> float:
        links = [(problem.links[at], n) for at, n in row.links.items()]
        copies = sum(n * float(l.bytes[l.rows[choice[l.first]], l.columns[choice[l.second]]]) for l, n in links)
        return sum(float(b[choice[c]]) for c, b in row.nodes.items()) + copies

    return max(map(one, problem.rows), default=0.0)
