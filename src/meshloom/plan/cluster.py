"""Operators in their order, cut into layers: of all cuts whose layers are about equally heavy, the one across which fewest bytes pass.

What is hard about choosing the stages of a pipeline for a function of thousands of operators is their number; a few dozen layers are quickly assigned
(`plan/assign.py`).  Source: Alpa, Zheng et al. 2022, arXiv 2201.12023, section 5.2 (equation 6), whose program minimises the largest sum alone; here what
that leaves open is decided too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EPSILON = 0.5
"""How much heavier than the mean a layer may be, as a part of it: Alpa's default."""
ROUNDING = 1e-9
"""Relative; a sum of floats may miss the limit by its rounding."""


class Clusters(NamedTuple):
    """starts: the first operator of each layer.  flops: of each.  received: bytes that each takes from layers before it.  limit: on the flops of one."""

    starts: tuple[int, ...]
    flops: tuple[float, ...]
    received: tuple[float, ...]
    limit: float

    def layer(self, operator: int) -> int:
        """The layer of an operator."""
        return int(np.searchsorted(self.starts, operator, side="right")) - 1


def cluster(flops: Sequence[float], received: np.ndarray, layers: int, epsilon: float = EPSILON) -> Clusters:
    """The best cut of n operators into consecutive layers: the smallest largest `received`, then the smallest sum of them, then the most even flops
    (by variance), each layer at most (1 + epsilon) x the mean.

    flops: [n].  received: bytes that layer [i, k] takes from operators before it, [n, n] at [i, k]; or [n], what passes in front of operator i, however
    long the layer.  Raises ValueError for fewer operators than layers, for no work, and where no cut keeps to the limit (with the smallest epsilon)."""
    work, crossing = np.asarray(flops, float), np.asarray(received, float)
    n = len(work)
    if n < layers or layers < 1:
        raise ValueError(
            f"{n} operator{'s' * (n != 1)} cannot be cut into {layers} layers, each of one at least. Use 1 to {n} layers."
            if n
            else "There is no operator to cut into layers: the function is empty. Give one that computes something."
        )
    if not work.sum() > 0:
        raise ValueError(f"None of the {n} operators has any work (flops), so no layer can be heavier than another. Give their flops.")
    total, limit = np.concatenate([[0.0], np.cumsum(work)]), (1 + epsilon) * work.sum() / layers
    weight = total[None, 1:] - total[:-1, None]  # [i, k]: of operators i to k
    allowed = np.triu(weight <= limit * (1 + ROUNDING))
    cost = np.where(allowed, crossing if crossing.ndim == 2 else crossing[:, None], np.inf)
    cost[0] = np.where(allowed[0], 0.0 if crossing.ndim == 1 else cost[0], np.inf)
    largest = _bottleneck(cost, layers)
    if not np.isfinite(largest):
        raise ValueError(_too_heavy(work, layers, epsilon))
    cost[cost > largest] = np.inf
    square = np.where(np.isfinite(cost), (weight / work.sum()) ** 2, np.inf)
    starts = _least(cost, square, layers)
    ends = [*starts[1:], n]
    return Clusters(
        tuple(starts),
        tuple(float(weight[i, k - 1]) for i, k in zip(starts, ends)),
        tuple(float(cost[i, k - 1]) for i, k in zip(starts, ends)),
        limit,
    )


def _bottleneck(cost: np.ndarray, layers: int) -> float:
    """The smallest largest cost of a cut; inf where there is none.  cost: [i, k]."""
    best = cost[0]  # [k]: of the first operators, up to k, in one layer
    for _ in range(layers - 1):
        best = np.maximum(np.concatenate([[np.inf], best[:-1]])[:, None], cost).min(0)
    return float(best[-1])


def _least(cost: np.ndarray, second: np.ndarray, layers: int) -> list[int]:
    """The starts of the cut with the smallest sum of costs, of equal ones that with the smallest sum of `second`."""
    n = len(cost)
    first, then, back = cost[0].copy(), second[0].copy(), []
    for _ in range(layers - 1):
        before, also = (np.concatenate([[np.inf], a[:-1]]) for a in (first, then))
        sums = before[:, None] + cost
        first = sums.min(0)
        ties = np.where(sums == first, also[:, None] + second, np.inf)
        back.append(ties.argmin(0))
        then = ties[back[-1], np.arange(n)]
    starts, end = [], n - 1
    for choice in reversed(back):
        starts.append(int(choice[end]))
        end = starts[-1] - 1
    return [0, *reversed(starts)]


def _too_heavy(work: np.ndarray, layers: int, epsilon: float) -> str:
    """Why no cut keeps to the limit, and what would."""
    least = _lightest(work, layers)
    need = np.ceil((least * layers / work.sum() - 1) * 1000) / 1000
    heavy = int(work.argmax())
    return (
        f"No cut of {len(work)} operators into {layers} layers keeps each within {1 + epsilon:g} x the mean of their flops: the heaviest layer of the most "
        f"even cut has {least * layers / work.sum():.3f} x (operator {heavy} alone {work[heavy] * layers / work.sum():.3f} x). "
        f"Allow epsilon {need:g}, or use fewer layers."
    )


def _lightest(work: np.ndarray, layers: int) -> float:
    """Flops of the heaviest layer of the most even cut."""
    total = np.concatenate([[0.0], np.cumsum(work)])
    return _bottleneck(np.where(np.triu(np.ones((len(work),) * 2, bool)), total[None, 1:] - total[:-1, None], np.inf), layers)
