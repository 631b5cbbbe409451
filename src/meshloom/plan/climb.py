"""A good layout without a proof, where there are too many meshes to bound each of them: from the most promising mesh of every kind, devices move from one
mesh axis to another as long as the bound of the best choice that fits falls."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from meshloom.plan.bounds import Bounds, Choice
from meshloom.plan.space import Pattern, meshes, sieve

KINDS = 10
"""Kinds of layout from which is climbed."""
STEPS = 12
"""Moves from one start at most."""


class Spot(NamedTuple):
    """A mesh, and its choices that may fit, the lowest bound first."""

    pattern: Pattern
    sizes: dict[str, int]
    choices: list[Choice]

    @property
    def height(self) -> float:
        """The lowest bound; infinite where nothing fits."""
        return self.choices[0].time if self.choices else np.inf


def climb(q: Any, bounds: Bounds, starts: Iterable[tuple[Pattern, dict[str, int]]]) -> list[Spot]:
    """The best mesh near each of the most promising starts, one of a kind.  starts: meshes in the order of their bounds."""
    first: dict[tuple[str, ...], Spot] = {}
    for pattern, sizes in starts:
        if pattern.kind not in first:
            first[pattern.kind] = spot(q, bounds, pattern, sizes)
    best = sorted((one for one in first.values() if one.choices), key=lambda one: one.height)[:KINDS]
    return [_up(q, bounds, one) for one in best]


def spot(q: Any, bounds: Bounds, pattern: Pattern, sizes: dict[str, int]) -> Spot:
    """A mesh with its choices."""
    limit = q.cluster.hardware.memory
    fit = [choice for choice in bounds.choices(pattern, sizes) if choice.memory <= limit]
    return Spot(pattern, sizes, sorted(fit, key=lambda choice: choice.time))


def _up(q: Any, bounds: Bounds, here: Spot) -> Spot:
    """Where no neighbour is better, or the steps are used up."""
    for _ in range(STEPS):
        near = [spot(q, bounds, here.pattern, sizes) for sizes in neighbours(q, here.pattern, here.sizes)]
        best = min(near, key=lambda one: one.height, default=here)
        if best.height >= here.height:
            break
        here = best
    return here


def neighbours(q: Any, p: Pattern, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Meshes in which one mesh axis has given a factor of its devices, the smallest, to another; each keeps two at least, and those that the question fixes."""
    fixed = meshes(p, q.cluster.devices, q.allowed.words) if q.allowed.words else None
    for giver, taker in itertools.permutations(sizes, 2):
        factor = next((d for d in range(2, sizes[giver]) if sizes[giver] % d == 0), 0)
        if not factor:
            continue
        moved = {**sizes, giver: sizes[giver] // factor, taker: sizes[taker] * factor}
        asked = fixed is None or np.all([fixed[axis] == n for axis, n in moved.items()], axis=0).any()
        if asked and sieve(q.config, q.seq, q.sequences, p, {axis: np.array([n]) for axis, n in moved.items()}).all():
            yield moved
