"""The least time that a step's own work takes on one device, for many meshes at once: `plan.work` and `plan.time` with arrays, for `bounds.py`."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from meshloom.core.layout import ONE_DEVICE
from meshloom.core.spec import Spec
from meshloom.ops.attention import KERNELS
from meshloom.parallel.base import in_stack
from meshloom.plan.flops import is_matrix
from meshloom.plan.splits import Splits, own
from meshloom.plan.time import rate
from meshloom.plan.work import BACK, FORWARD, INSIDE, LOGIT, UPDATE, added, embedded, last, pairs

Array = np.ndarray


class Done(NamedTuple):
    """Seconds, at least: of the passes over the layers, and of all else."""

    forward: Array
    backward: Array
    rest: Array


class Seen(NamedTuple):
    """Pairs of query and key that an attention computes, whether their scores stay on the chip, products of its backward pass at least."""

    pairs: float
    inside: bool
    back: int


class Toil:
    """A question's work."""

    def __init__(self, q: Any, leaves: Mapping[str, Spec]) -> None:
        self.q, h = q, q.cluster.hardware
        self.peak, self.stream, self.op = rate(h, q.dtype) * h.efficiency, h.bandwidth * h.stream, h.op
        self.kinds = {kind: q.model.kinds(q.config).count(kind) for kind in dict.fromkeys(q.model.kinds(q.config))}
        self.wide = q.model.wide(q.config)
        self.beside = float(sum(q.stored(ONE_DEVICE).values()))
        self.matrices = {
            kind.stack: [leaf for path, leaf in leaves.items() if in_stack(path, kind.stack) and is_matrix(leaf)] for kind in self.kinds
        }
        self.pairs = {kind.window: self._pairs(kind.window) for kind in self.kinds}

    def _pairs(self, window: int | None) -> tuple[list[Seen], Seen]:
        """What each attention that may run here sees of a whole sequence; what a ring does."""
        gpu, seq = self.q.cluster.hardware.platform == "gpu", self.q.seq
        rows = [row for row in KERNELS if row != "decode" and (gpu or row != "cudnn")]
        one = lambda row: Seen(pairs(row, seq, window), row in INSIDE, 4 if row in ("reference", "blocks") else 5)
        return [one(row) for row in rows], one("ring")

    def longer(self, flops: Array, size: Array) -> Array:
        """The roofline."""
        return np.maximum(flops / self.peak, size / self.stream)

    def work(self, s: Splits, run: Any) -> Done:
        """Seconds of a step's work."""
        forward, again, backward, late = (s.ones * 0 for _ in range(4))
        for kind, n in self.kinds.items():
            mine = self.matrices[kind.stack]
            made = [(leaf, self.product(s, leaf, run) * n) for leaf in mine]
            between = self.between(s, kind) * n
            seen, behind = self.attention(s, kind.window)
            all_made = sum(time for _, time in made)
            forward = forward + all_made + between + seen * n
            again = again + run.full * (sum(time for leaf, time in made if not last(leaf)) + between + seen * n)
            again = again + (run.some - run.full) * (between + (0 if "context" in s.sizes else seen * n))
            gradient = sum(time for leaf, time in made if not leaf.frozen)
            backward = backward + all_made + behind * n + 2 * between + (1 - run.late) * gradient
            late = late + run.late * gradient
        again = again + run.again * forward
        fill = run.fill / s.stages
        # at most the gradients of matrices are put off, whose ticks have no bubble at least
        return Done(forward * fill, (again + backward) * fill + late / s.stages, self.rest(s, run))

    def product(self, s: Splits, leaf: Spec, run: Any) -> Array:
        """A step's products with one layer's matrix, forward."""
        c, names = self.q.config, own(leaf)
        cut = 1 if names[0] in ("embed", "query_rank", "key_rank") else len(names) - 1
        sizes = dict(zip(leaf.axes, leaf.shape))
        part = lambda some: math.prod(sizes[n] for n in some) / s.split("live", *some)
        into, out, rows, held = part(names[:cut]), part(names[cut:]), s.tokens, 1.0
        if "expert" in leaf.axes:
            each = min(c.capacity * c.top, c.experts) if c.capacity else c.top
            rows = rows * each / (s.wide if s.folded else 1)
            held = sizes["expert"] / s.split("live", "expert")
        moved = rows * (into + out) + run.micro * held * into * out
        width = 4 if leaf.exact else s.width
        return self.longer(2 * rows * into * out, moved * width) + run.micro * self.op

    def between(self, s: Splits, kind: Any) -> Array:
        """What lies between one layer's products, forward; of experts, the rows of the device's own tokens alone."""
        c = self.q.config
        work, stream = s.wide * s.over("cube_embed"), c.embed / (s.short * s.narrow)
        heads, keys = c.heads * c.head / work, c.kv_heads * c.head / (s.keys * s.over("cube_embed"))
        wide = self.wide if not getattr(c, "experts", 0) else c.beside if kind.tells else c.ffn
        features = 6 * stream + 2 * c.embed / s.narrow + 2 * (heads + keys) + 3 * wide / work
        if kind.tells:
            features = features + c.top * min(1.0, c.capacity or 1.0) * (6 * c.embed + 3 * c.expert_ffn / s.wide)
        return s.tokens * features * s.width / self.stream

    def attention(self, s: Splits, window: int | None) -> tuple[Array, Array]:
        """One layer's attention, forward and backward, in a step."""
        c, q = self.q.config, self.q
        plain, ring = self.pairs[window]
        heads = c.heads / (s.wide * s.over("cube_embed", "ulysses"))
        many = s.tokens * s.over("ulysses") * s.over("context") / q.seq * heads
        ends = many * q.seq / s.over("context") * c.head * s.width

        def takes(row: Seen) -> tuple[Array, Array]:
            seen = row.pairs / s.over("context")
            held = 0.0 if row.inside else many * seen
            return (
                self.longer(4 * many * seen * c.head, 4 * ends + FORWARD * held),
                self.longer(2 * row.back * many * seen * c.head, 8 * ends + BACK * held),
            )

        rows = [takes(row) for row in ([ring] if "context" in s.sizes else plain)]
        return np.min([row[0] for row in rows], axis=0), np.min([row[1] for row in rows], axis=0)

    def rest(self, s: Splits, run: Any) -> Array:
        """The head and the embedding, once a micro-batch; the update."""
        c = self.q.config
        rows = c.vocab_padded / (s.wide * s.stages)
        scored = s.tokens / s.over("cube_embed")
        logits = scored * rows
        head = self.longer(6 * logits * c.embed, 3 * (scored + run.micro * rows) * c.embed * s.width + LOGIT * logits)
        table = (s.tokens * c.embed * embedded(s.width) + 4 * run.micro * rows * c.embed) / self.stream
        trained = [leaf for leaf in s.leaves if not leaf.frozen]
        sums = sum(s.elements("grad", leaf) * added(s.width) for leaf in trained) * np.where(run.micro > 1, run.micro, 0) / self.stream
        update = 4 * UPDATE * sum(s.elements("rest", leaf) for leaf in trained) / self.stream
        return head + table + sums + update
