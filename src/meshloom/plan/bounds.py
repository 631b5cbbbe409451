"""Lower bounds on the time and the memory of many candidates at once, from arrays of their sizes.

Each term is one of `plan.time` or `plan.memory` with everything left out that could only add to it: roundings up, small arrays, kernels, latencies but a
step's, a slower way than the best that so many devices can have. So a bound is never above the model's own value (tests/plan/test_bounds.py holds it to
that), and what lies above the best candidate need not be priced. Of a mesh the bound holds for all its choices: one micro-batch for what each gathers
again, the most for the bubble, nothing computed again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import named_leaves
from meshloom.plan.room import parked, room
from meshloom.plan.space import Pattern, chunks_of, divisors, schedules
from meshloom.plan.splits import Splits, own
from meshloom.plan.time import HIDES
from meshloom.plan.toil import Toil
from meshloom.plan.ways import moved
from meshloom.runner.run import UNOFFERED

Array = np.ndarray


class Choice(NamedTuple):
    """What is left to choose on a mesh, with its bounds. pipe: options of the pipeline."""

    time: float
    memory: float
    pipe: tuple[str, ...]
    micro: int
    remat: str


class Floor(NamedTuple):
    """Of many meshes: seconds and bytes that none of their choices goes below, and how many choices each has."""

    time: Array
    memory: Array
    choices: Array


class Run(NamedTuple):
    """How a step runs, as bounds read it: arrays, or one for all. micro: micro-batches. fill: what the bubble multiplies a pass by, at least. some, full:
    1 where there is a remat, where it is `full`. again: 1 where a pipeline's backward runs the forward first. late: 1 where gradients of matrices may be
    put off. chunks: parts of the layers on a stage. places: inputs (or what they leave) that a
    stage keeps at a time, at least. parked: 1 where results of products wait in the host's memory."""

    micro: Array
    fill: Array
    some: Any
    full: Any
    again: Any
    late: Any
    chunks: Any
    places: Any = 1.0
    parked: Any = 0.0


SOME, FULL = {"none": 0.0, "selective": 1.0, "full": 1.0, "offload": 1.0}, {"none": 0.0, "selective": 0.0, "full": 1.0, "offload": 0.0}
"""What a row of remat is for bounds; under a pattern of several nothing is computed again at least."""
KEEPS = {"none": 0.0, "selective": 0.0, "full": 1.0, "offload": 1.0}
"""Whether a layer keeps its input alone on the device; under a pattern it may."""


class Bounds:
    """Bounds of one question's candidates. What does not depend on the mesh is worked out once."""

    def __init__(self, q: Any) -> None:
        leaves = named_leaves(q.model.specs(q.config), is_spec)
        self.q, self.toil = q, Toil(q, leaves)
        self.leaves = together(leaf for leaf in leaves.values() if len(own(leaf)) > 1)
        h = q.cluster.hardware
        parks = h.host and h.platform not in UNOFFERED
        self.remats = [remat for remat in q.allowed.remats if remat != "offload" or parks]
        self.least = min(((SOME.get(remat, 0.0), FULL.get(remat, 0.0)) for remat in self.remats), default=(0.0, 0.0))
        self.lean = max(((SOME.get(remat, 1.0), KEEPS.get(remat, 1.0)) for remat in self.remats), default=(0.0, 0.0))
        self.hides = HIDES[q.cluster.hardware.platform]
        self.options: dict[tuple[bool, int], list[tuple[str, ...]]] = {}

    def splits(self, p: Pattern, sizes: Mapping[str, Array]) -> Splits:
        """How a pattern's meshes split what there is."""
        return Splits(self.q, p, {axis: np.asarray(n, float) for axis, n in sizes.items()}, self.leaves)

    def meshes(self, p: Pattern, sizes: Mapping[str, Array]) -> Floor:
        """Bounds for all choices of each mesh."""
        s, stages = self.splits(p, sizes), np.asarray(sizes.get("pipe", 1)) * np.ones(len(next(iter(sizes.values()))), int)
        rows = (self.q.sequences // s.batch_all).astype(int)
        most, chunks = self._most(rows), self._chunks(p, stages)
        stash = True in self.q.allowed.stash
        again = float("pipe" in p.words and not stash)
        time = np.full(len(stages), np.inf)
        for low, high in self._ranges(p, stages, most):
            run = Run(low, 1 + (stages - 1) / (high * chunks), *self.least, again, float("pipe" in p.words), 1)
            time = np.minimum(time, np.where(low <= most, self.time(s, run), np.inf))
        fewest = np.ones(len(stages)) if self.q.allowed.micro is None else np.full(len(stages), float(self.q.allowed.micro))
        fill = 1 + (stages - 1) / (most * chunks)
        lean = Run(most.astype(float), fill, *self.lean, again, 0.0, chunks, places("1f1b", stages, most, 1))
        whole = lean._replace(micro=fewest, places=1.0)  # one micro-batch has no sum of gradients
        memory = np.minimum(self.memory(s, lean), self.memory(s, whole))
        pairs = np.stack([rows, stages])
        kinds, where = np.unique(pairs, axis=1, return_inverse=True)
        counts = np.array([self._count(p, int(n), int(stage)) for n, stage in kinds.T])
        choices = counts[where.reshape(-1)] * len(self.remats)
        return Floor(time, memory, choices)

    def choices(self, p: Pattern, sizes: Mapping[str, int]) -> list[Choice]:
        """Every choice on one mesh, with bounds of its own."""
        s = self.splits(p, {axis: np.array([n]) for axis, n in sizes.items()}).exactly()
        stages = int(sizes.get("pipe", 1))
        rows = self.q.sequences // int(s.batch_all[0])
        rows = [
            (options, m, remat)
            for options in self._options(p, stages)
            for m in self._micros(rows, stages, chunks_of(options))
            for remat in self.remats
        ]
        if not rows:
            return []
        column = lambda of: np.array([of(*row) for row in rows], float)
        micro, chunks = column(lambda o, m, r: m), column(lambda o, m, r: chunks_of(o))
        run = Run(
            micro,
            1 + (stages - 1) / (micro * chunks),
            column(lambda o, m, r: SOME.get(r, 0.0)),
            column(lambda o, m, r: FULL.get(r, 0.0)),
            column(lambda o, m, r: bool(o) and "stash" not in o),
            column(lambda o, m, r: "zb" in o),
            chunks,
            column(lambda o, m, r: places(o[0] if o else "", stages, m, chunks_of(o))),
            column(lambda o, m, r: r == "offload"),
        )
        lean = run._replace(some=column(lambda o, m, r: SOME.get(r, 1.0)), full=column(lambda o, m, r: KEEPS.get(r, 1.0)))
        time, memory = self.time(s, run) + 0 * micro, self.memory(s, lean) + 0 * micro
        return [Choice(float(t), float(b), *row) for t, b, row in zip(time, memory, rows)]

    def time(self, s: Splits, run: Run) -> Array:
        """Seconds of a step, at least."""
        work, away = self.toil.work(s, run), moved(s, run)
        passes = [(work.forward, away.forward), (work.backward, away.backward)]
        if self.hides:
            share = 1 / self.q.config.layers  # of what hides, one layer's part at least does not
            park = parked(s, run)
            both = [(busy, gone, park) for busy, gone in passes]
            beside = sum(np.maximum(_shown(b, gone, share) + share * p, _shown(b, p, share) + share * gone) for b, gone, p in both)
        else:
            beside = sum(busy + gone for busy, gone in passes)
        return beside + work.rest + away.waits

    def memory(self, s: Splits, run: Run) -> Array:
        """Bytes of a device, at least."""
        return room(s, run, self.toil.beside)

    def _ranges(self, p: Pattern, stages: Array, most: Array) -> list[tuple[Array, Array]]:
        """Numbers of micro-batches, from and to: few have a large bubble, many gather weights often, so that a bound for all at once would be loose."""
        if self.q.allowed.micro is not None:
            return [(np.full(len(most), float(self.q.allowed.micro)), most)]
        if "pipe" not in p.words:
            return [(np.ones(len(most)), most)]
        cuts = [np.ones(len(most)), *(stages * times + 1.0 for times in (1, 4, 16))]
        highs = [*(np.minimum(cut - 1, most) for cut in cuts[1:]), most]
        return list(zip(cuts, (np.maximum(high, 1) for high in highs)))

    def _most(self, rows: Array) -> Array:
        """The most micro-batches of each mesh."""
        return rows if self.q.allowed.micro is None else np.full(len(rows), self.q.allowed.micro)

    def _options(self, p: Pattern, stages: int) -> list[tuple[str, ...]]:
        key = ("pipe" in p.words, stages)
        if key not in self.options:
            self.options[key] = schedules(p, self.q.config.layers, stages, self.q.allowed)
        return self.options[key]

    def _micros(self, rows: int, stages: int, chunks: int) -> list[int]:
        """Numbers of micro-batches that fit: rows of the batch on a device divide by them, and groups of stages fill chunks."""
        fit = [m for m in divisors(rows) if self.q.allowed.micro in (None, m)]
        return [m for m in fit if m % stages == 0] if chunks > 1 else fit

    def _count(self, p: Pattern, rows: int, stages: int) -> int:
        """How many choices of schedule and micro-batches a mesh has."""
        return sum(len(self._micros(rows, stages, chunks_of(options))) for options in self._options(p, stages))

    def _chunks(self, p: Pattern, stages: Array) -> Array:
        """The most parts of a stage that any schedule has."""
        most = {n: max((chunks_of(options) for options in self._options(p, int(n))), default=1) for n in np.unique(stages)}
        return np.array([most[n] for n in stages])


def together(leaves: Iterable[Spec]) -> list[Spec]:
    """Parameters that are split alike as one, so large as all of them: so fewer arrays of numbers are worked out."""
    alike: dict[tuple, list[Spec]] = {}
    for leaf in leaves:
        alike.setdefault((leaf.axes, leaf.shape[:-1], leaf.exact, leaf.frozen), []).append(leaf)
    return [replace(of[0], shape=(*of[0].shape[:-1], sum(leaf.shape[-1] for leaf in of))) for of in alike.values()]


def _shown(busy: Array, gone: Array, share: float) -> Array:
    """A pass's work with what hides behind it."""
    return np.maximum(busy + share * gone, gone)


def places(schedule: str, stages: Any, micro: Any, chunks: Any) -> Any:
    """Inputs that the first stage keeps at a time, at least: all of them under gpipe, else those on their way there and back."""
    most = micro * chunks
    return most if schedule == "gpipe" else np.minimum(2 * (stages - 1) + (chunks - 1) * stages + 1, most)
