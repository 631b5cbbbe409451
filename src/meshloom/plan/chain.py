"""What each layer of a chain keeps for its backward pass, so that the step fits a limit and computes as little again as it can: an exact dynamic program.

A layer, or a group of layers that keep one input together, has choices: bytes that it saves from its forward to its backward pass, seconds that it adds to
the step, and bytes that its backward pass needs beside while it runs. Going forward what is saved grows; going backward layer i finds saved what layers
1..i saved, and frees its own when it ends. So

    peak = max(saved by all + end, max over pieces: saved up to this one, itself included + what its backward needs beside)

where `end` is what the step holds between both passes beside the layers (the loss). This is the chain of Rotor with one value to save a layer (Beaumont et
al. 2019, arXiv 1911.13214) and Checkmate's problem (Jain et al. 2020, arXiv 1910.02653) for a path, with recomputation of a piece at its own backward.

Exact: at each layer the program keeps every pair (bytes saved so far, seconds so far) that no other one beats in both. What follows is possible with less
saved wherever it is with more, and costs the same, so a pair that is beaten can be left out. Bytes are whole numbers; nothing is rounded. Of the pairs
those go too that cannot become better than a pattern already known: for any price of a byte, L(price) = seconds so far + price * saved so far + the least
of both over the layers to come - price * (limit - end) is no more than the seconds of any way to end that fits (weak duality).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROUNDING = 1e-9
"""Part of the seconds by which sums in another order may differ; what is dropped is worse by more."""


class Choice(NamedTuple):
    """What a piece of the chain may do. word: as in core/remat.py. layers: so many of the chain. saved: bytes, from forward to backward. seconds: added to
    the step. beside: bytes that its backward pass holds beside all that is saved."""

    word: str
    layers: int
    saved: int
    seconds: float
    beside: int


class Chosen(NamedTuple):
    """pieces: in order. seconds: that all add. peak: bytes."""

    pieces: tuple[Choice, ...]
    seconds: float
    peak: int

    @property
    def words(self) -> tuple[str, ...]:
        """The word of each layer of the chain."""
        return tuple(piece.word for piece in self.pieces for _ in range(piece.layers))

    @property
    def label(self) -> str:
        """Its words, each once."""
        return " and ".join(dict.fromkeys(self.words))


class Front(NamedTuple):
    """Ways through the first layers that no other one beats, by bytes saved. cost: what is to be least. From which way at which layer each comes, by
    which choice."""

    saved: np.ndarray
    cost: np.ndarray
    at: np.ndarray
    way: np.ndarray
    choice: np.ndarray


Chain = Sequence[tuple[Choice, ...]]
"""The choices that may begin at each layer."""


def solve(chain: Chain, limit: int, end: int = 0, outside: int = 0) -> Chosen:
    """The pattern that adds the fewest seconds of those whose peak is no more than `limit` bytes.  end: bytes held between both passes.  outside: bytes
    that are held besides in any case, which a refusal counts with the rest.

    Raises ValueError where none fits, with the least that one needs."""
    first = _ways(chain, limit, end, np.inf, 16)
    if first is None:
        least = fewest(chain, end)
        raise ValueError(
            f"No choice of what layers keep fits {sized(limit + outside)}: the one that needs least, {least.label}, takes {sized(least.peak + outside)}, "
            f"{sized(least.peak - limit)} more. Use smaller micro-batches, or a layout that splits more."
        )
    best = _ways(chain, limit, end, first.seconds * (1 + ROUNDING), None)
    assert best is not None
    return arranged(chain, best, end)


def fewest(chain: Chain, end: int = 0) -> Chosen:
    """A pattern of the lowest peak there is."""
    fronts = [_nothing(1)]
    for ending in _ending(chain)[1:]:
        rows = []
        for start, choice, number in ending:
            f = fronts[start]
            saved = f.saved + choice.saved
            rows.append((saved, np.maximum(f.cost, saved + choice.beside), start, number))
        fronts.append(_kept(rows))
    last = fronts[-1]
    return _back(chain, fronts, int(np.argmin(np.maximum(last.cost, last.saved + end))), end)


def _ways(chain: Chain, limit: int, end: int, most: float, width: int | None) -> Chosen | None:
    """The fastest pattern that fits; None for none.  most: seconds of a pattern that is known.  width: how many ways are looked at from each layer, spread
    over all, the one that has saved least among them (so that a pattern is found where there is one); None: all that can be best."""
    fronts = [_nothing(1)]
    prices, rest = _prices(chain)
    for at, ending in enumerate(_ending(chain)[1:], 1):
        rows = []
        for start, choice, number in ending:
            f = fronts[start]
            saved = f.saved + choice.saved
            fits = saved + choice.beside <= limit
            rows.append((np.where(fits, saved, -1), f.cost + choice.seconds, start, number))
        front = _kept(rows)
        bound = (front.cost + prices * (front.saved - (limit - end)) + rest[:, at : at + 1]).max(0)
        possible = (bound <= most) & (front.saved + end <= limit)
        fronts.append(_thinned(Front(*(a[possible] for a in front)), width))
    return _back(chain, fronts, int(np.argmin(fronts[-1].cost)), end) if len(fronts[-1].cost) else None


def _ending(chain: Chain) -> list[list[tuple[int, Choice, int]]]:
    """Before each layer and at the end: the choices of pieces that end there, where each begins, the choice, its number there."""
    found: list[list] = [[] for _ in range(len(chain) + 1)]
    for start, choices in enumerate(chain):
        for number, c in enumerate(choices):
            if start + c.layers <= len(chain):
                found[start + c.layers].append((start, c, number))
    return found


def _nothing(ways: int) -> Front:
    """So many ways that save nothing and cost nothing."""
    return Front(*(np.zeros(ways, t) for t in (np.int64, np.float64, np.int64, np.int64, np.int64)))


def _kept(rows: list[tuple[np.ndarray, np.ndarray, int, int]]) -> Front:
    """The ways of all these that none beats; those that save less than nothing are none.  rows: bytes saved, cost, where from, by which choice."""
    if not rows:
        return _nothing(0)
    parts = [
        (saved, cost, np.full(len(saved), start), np.arange(len(saved)), np.full(len(saved), number)) for saved, cost, start, number in rows
    ]
    found = Front(*(np.concatenate(column) for column in zip(*parts)))
    order = np.lexsort((found.cost, found.saved))
    order = order[found.saved[order] >= 0]
    cost = found.cost[order]
    better = np.concatenate([[True], cost[1:] < np.minimum.accumulate(cost)[:-1]]) if len(order) else np.zeros(0, bool)
    return Front(*(a[order[better]] for a in found))


def _thinned(front: Front, width: int | None) -> Front:
    """So many ways at most, spread over all, the first among them."""
    if width is None or len(front.cost) <= width:
        return front
    keep = np.unique(np.linspace(0, len(front.cost) - 1, width).astype(int))
    return Front(*(a[keep] for a in front))


def _prices(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Prices of a byte [n, 1], seconds, and the least of seconds + price * saved from each layer on to the end [n, layers + 1]."""
    each = {(c.saved / c.layers, c.seconds / c.layers) for choices in dict.fromkeys(tuple(choices) for choices in chain) for c in choices}
    slopes = {(b[1] - a[1]) / (a[0] - b[0]) for a in each for b in each if a[0] > b[0] and a[1] < b[1]}
    found = np.array([0.0, *sorted(slopes)])
    found = found[np.unique(np.linspace(0, len(found) - 1, 24).astype(int))][:, None]
    rest = np.zeros((len(found), len(chain) + 1))
    for at in reversed(range(len(chain))):
        ways = [c.seconds + found[:, 0] * c.saved + rest[:, at + c.layers] for c in chain[at] if at + c.layers <= len(chain)]
        rest[:, at] = np.min(ways, axis=0) if ways else np.inf
    return found, rest


def _back(chain: Chain, fronts: list[Front], way: int, end: int) -> Chosen:
    """The pattern of one way through all layers."""
    found, at = [], len(chain)
    while at:
        front = fronts[at]
        start, number = int(front.at[way]), int(front.choice[way])
        found.append(chain[start][number])
        at, way = start, int(front.way[way])
    return _of(tuple(reversed(found)), end)


def _of(pieces: tuple[Choice, ...], end: int) -> Chosen:
    return Chosen(pieces, sum(piece.seconds for piece in pieces), peak(pieces, end))


def peak(pieces: Sequence[Choice], end: int = 0) -> int:
    """Bytes at the peak of a pattern."""
    saved, most = 0, 0
    for piece in pieces:
        saved += piece.saved
        most = max(most, saved + piece.beside)
    return max(most, saved + end)


def arranged(chain: Chain, chosen: Chosen, end: int = 0) -> Chosen:
    """The same pieces in an order of few runs: where layers with the same choices follow each other, what needs most beside comes first. That is the best
    order there: of two neighbours a, b the peak is saved(a) + max(beside(a), saved(b) + beside(b)), least with the larger `beside` first."""
    found: list[Choice] = []
    at, stretch, choices = 0, [], None
    for piece in chosen.pieces:
        same = all(tuple(chain[i]) == tuple(chain[at]) for i in range(at, min(at + piece.layers, len(chain))))
        if not same or tuple(chain[at]) != choices:
            found += _ordered(stretch)
            stretch = []
        stretch.append(piece)
        choices = tuple(chain[at]) if same else None
        at += piece.layers
    return _of((*found, *_ordered(stretch)), end)


def _ordered(stretch: list[Choice]) -> list[Choice]:
    return sorted(stretch, key=lambda c: (-c.beside, c.word))


def sized(size: float) -> str:
    """Bytes for people: "1.5 GB", "340 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"
