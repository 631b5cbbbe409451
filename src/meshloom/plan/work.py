"""What one device computes in a step, by shapes: operations of matrix products, bytes through its memory, kernels.

Products take 2 operations for each token and element that lies on the device while its layer runs; experts' rows are taken to be balanced. Attention
counts the pairs that its row of `ops.attention.KERNELS` computes, the triangle above the diagonal only where the row does not skip it.
Bytes are those of inputs and results of every product, and of what is read and written between products: norms, rotations, activations, residual sums,
scores where a row puts them into memory. What a compiler fuses beyond that, or reads twice, is not known here.
On a CPU what a loop keeps for the backward pass is copied besides.
Backward: two products for each, or one where the weight is frozen. Again: what `runner.run.REMAT` does not keep, without the last product of a layer, whose
result nobody needs; in a pipeline whose stages keep inputs alone the whole part besides.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from meshloom.core.leaf import split_seq
from meshloom.core.remat import group_of, row_of
from meshloom.core.spec import Spec
from meshloom.models.base import Kind, Model
from meshloom.ops.attention import Case, choose
from meshloom.ops.blocks import block_size
from meshloom.ops.dispatch import across
from meshloom.ops.exchange import kv_heads_inside
from meshloom.ops.loss import chunk_count
from meshloom.ops.moe import capacity
from meshloom.parallel.base import Shapes, in_stack
from meshloom.parallel.part import by_remat
from meshloom.parallel.pipe import stashes
from meshloom.plan.flops import is_matrix
from meshloom.plan.layer import kept as kept_of

FORWARD, BACK = 20, 28
"""Bytes through memory for each pair of query and key whose score is written out, fp32: scores, their exponentials, sums; backward also their gradients."""
INSIDE, WRITTEN_BLOCK = {"cudnn"}, 512
"""Attention rows that keep scores on the chip; tokens of a block of the rows that stream."""
STACKS = {"cpu"}
"""Platforms on which a loop over layers copies what it keeps into one array of all layers, and a layer's share out of it: accelerators write it there at once."""
STACK = "the loop's stack"
"""What that array is called."""
UPDATE = 8
"""fp32 numbers that AdamW and the norm read and write for each parameter: gradient twice, weight, two moments; three of them written."""


LOGIT = 24
"""Bytes through memory for each logit, forward and backward, beside those of its products."""


def embedded(width: int) -> int:
    """Bytes through memory for each feature of a token in the embedding and its backward pass.  width: of a number of the arithmetic."""
    return 3 * width + 12


def added(width: int) -> int:
    """Bytes through memory for each gradient that is added to the fp32 sum over micro-batches."""
    return 8 + width


class Work(NamedTuple):
    """flops: of products. bytes: through the device's memory. ops: kernels. what: a phrase."""

    flops: float
    bytes: float
    ops: float
    what: str

    def times(self, n: float) -> "Work":
        """So often."""
        return Work(self.flops * n, self.bytes * n, self.ops * n, self.what)


class Works(NamedTuple):
    """What a device does. forward, again, backward, late: in its layers of one part (all, where there is no pipeline), once; late: gradients of matrices
    that a schedule puts off. outside: once a micro-batch. once: a step."""

    forward: tuple[Work, ...]
    again: tuple[Work, ...]
    backward: tuple[Work, ...]
    late: tuple[Work, ...]
    outside: tuple[Work, ...]
    once: tuple[Work, ...]


def works(model: Model, x: Shapes) -> Works:
    """The work of a step on one device."""
    found = [layers(model, part) for part in by_remat(x).values()]
    forward, again, backward, late = (tuple(one for part in found for one in part[at]) for at in range(4))
    if x.flow and not stashes(x.layout):
        twice = 2 if x.flow.late and x.remat != "none" else 1
        again = (*forward, *(one for one in again for _ in range(twice)))
    return Works(forward, again, backward, late, tuple(outside(x)), tuple(once(x)))


def layers(model: Model, x: Shapes) -> tuple[list[Work], list[Work], list[Work], list[Work]]:
    """Of layers that all keep the same: forward, again, backward, and what a schedule puts off.  x.remat: one word."""
    forward: list[Work] = []
    again: list[Work] = []
    backward: list[Work] = []
    late: list[Work] = []
    in_tick = x.flow.heavy * x.parts if x.flow and x.flow.heavy else x.run
    slots, group, row = {kind: in_tick.count(kind) / x.parts for kind in dict.fromkeys(in_tick)}, group_of(x.remat), row_of(x.remat)
    for kind, n in slots.items():
        mine = [s for path, s in x.leaves.items() if in_stack(path, kind.stack)]
        for s in (s for s in mine if is_matrix(s)):
            made = product(model, x, s)
            forward.append(made.times(n))
            # of layers that share an input, only the last one's last result is not needed again
            again += [made.times(n - n / group * last(s))] if row == "full" and (group > 1 or not last(s)) else []
            backward.append(made.times(n))
            if not s.frozen:
                (late if x.flow and x.flow.late else backward).append(made.times(n))
        between = elementwise(x, kind).times(n)
        seen, behind = attention(x, kind)
        forward += [seen.times(n), between]
        if x.layout.platform in STACKS and not all(x.straight):
            forward.append(stacked(x, "into").times(n))
            backward.append(stacked(x, "from").times(n))
        kept = row == "none" or (row in ("selective", "offload") and bool(x.layout.ring))
        again += [] if kept else [seen.times(n)]
        again += [] if row == "none" else [between]
        backward += [behind.times(n), between.times(2)]
    return forward, again, backward, late


def last(s: Spec) -> bool:
    """Whether a matrix is the last of a layer: nobody reads its result again in the backward pass."""
    return s.axes[-1] == "embed" and s.axes[-2] in ("ffn", "expert_ffn")


def sides(s: Spec, shape: tuple[int, ...]) -> tuple[int, int]:
    """Features that go into a matrix and come out of it.  shape: of the matrix, the axes of layers and experts included."""
    own = [(name, n) for name, n in zip(s.axes, shape) if name not in ("layer", "expert")]
    cut = 1 if own[0][0] in ("embed", "query_rank", "key_rank") else len(own) - 1
    return math.prod(n for _, n in own[:cut]), math.prod(n for _, n in own[cut:])


def product(model: Model, x: Shapes, s: Spec) -> Work:
    """One layer's product with a matrix, forward, on one device."""
    c, lay, shape = x.config, x.layout, x.layout.shard_shape("live", s)
    into, out = sides(s, shape)
    into *= lay.square[2] if lay.square else 1
    rows, held = x.rows * x.seq, into * out
    if "expert" in s.axes:
        at = s.axes.index("expert")
        each = capacity(x.seq, c.top, c.experts, c.capacity) * c.experts / x.seq if c.capacity else c.top
        rows, held = rows * each * lay.size(across(lay)) * shape[at] / s.shape[at], held * shape[at]
    what = "experts" if "expert" in s.axes else "matrices"
    return Work(2 * rows * into * out, (rows * (into + out) + held) * x.width_of(s), 1, what)


def elementwise(x: Shapes, kind: Kind) -> Work:
    """What lies between the products of one layer, forward: norms, residual sums, rotations, activations; of experts, rows there and back."""
    c, lay = x.config, x.layout
    work = lay.size((*lay.acts.get("heads", ()), *lay.inner))
    stream = c.embed / lay.size((*split_seq(lay), *lay.stream))
    heads, keys = c.heads * c.head / work, c.kv_heads * c.head / lay.size((*lay.acts.get("kv_heads", ()), *lay.inner))
    wide = x.wide if not getattr(c, "experts", 0) else c.beside if kind.tells else c.ffn
    features = 6 * stream + 2 * c.embed / lay.size(lay.stream) + 2 * (heads + keys) + 3 * wide / work
    numbers = x.rows * x.seq * features
    numbers += buffer(x) * (6 * c.embed + 3 * c.expert_ffn / lay.size(lay.live.get("expert_ffn", ()))) if kind.tells else 0
    return Work(0, numbers * x.width, 8, "norms, activations")


def stacked(x: Shapes, way: str) -> Work:
    """What a layer keeps for its backward pass, copied: read and written."""
    return Work(0, 2 * kept_of(x), 1, f"what is kept, {way} {STACK}")


def buffer(x: Shapes) -> float:
    """Rows that a device sorts, moves and activates for its experts: without a capacity those of all devices whose tokens it was sent, also where most are
    another's (ops/dispatch.py)."""
    c, lay = x.config, x.layout
    if c.capacity:
        return x.rows * capacity(x.seq, c.top, c.experts, c.capacity) * c.experts
    return x.rows * x.seq * c.top * lay.size(across(lay))


def pairs(row: str, seq: int, window: int | None) -> float:
    """Pairs of query and key that an attention row computes for a sequence."""
    if row == "reference":
        return seq * seq
    block = {"blocks": block_size(seq, window), "cudnn": 128}.get(row, min(WRITTEN_BLOCK, seq))
    reach = min(seq, (window or seq) + block)
    return sum(min(start + block, reach) * min(block, seq - start) for start in range(0, seq, block))


def attention(x: Shapes, kind: Kind) -> tuple[Work, Work]:
    """One layer's attention on one device, without its matrices: forward, backward."""
    c, lay = x.config, x.layout
    heads = max(1, c.heads // lay.size((*lay.acts.get("heads", ()), *lay.exchange, *lay.inner)))
    seq = x.seq * lay.size(lay.exchange)
    whole = seq * lay.size(lay.ring)
    if lay.ring:
        row, seen = "ring", pairs("ring", whole, kind.window) / lay.size(lay.ring)
    else:
        keys, drops = kv_heads_inside(c.heads, c.kv_heads, lay), c.attention_dropout > 0
        row = choose(
            Case(lay.platform, seq, seq, heads, keys, c.head, x.dtype, x.rows, kind.window is not None, x.packed, False, drops)
        ).name
        seen = pairs(row, seq, kind.window)
    many = x.rows * heads
    ends = many * seq * c.head * x.width
    held = 0 if row in INSIDE else many * seen
    products = 4 if row in ("reference",) or (row == "blocks" and seq <= 512) else 5
    forward = Work(4 * many * seen * c.head, 4 * ends + FORWARD * held, 4, "attention")
    return forward, Work(2 * products * many * seen * c.head, 8 * ends + BACK * held, 10, "attention")


def outside(x: Shapes) -> Iterable[Work]:
    """What comes once a micro-batch: the embedding and its gradient, the head with its loss and both gradients, sums of gradients."""
    c, lay, tokens = x.config, x.layout, x.rows * x.seq
    rows = c.vocab_padded // lay.size(lay.acts.get("vocab", ()))
    scored = tokens // lay.size(lay.inner)
    logits, chunks = scored * rows, chunk_count(scored, rows, lay.platform)
    ends = 3 * (scored + chunks * rows) * c.embed * x.width
    yield Work(6 * logits * c.embed, ends + LOGIT * logits, 8 * chunks, "head and loss")
    yield Work(0, tokens * c.embed * embedded(x.width) + 4 * rows * c.embed, 4, "embedding")
    if x.micro > 1:
        held = [x.elements("grad", s) * added(x.width_of(s)) for s in x.leaves.values() if not s.frozen]
        yield Work(0, sum(held), len(held), "sums of gradients")


def once(x: Shapes) -> Iterable[Work]:
    """What comes once a step: the update, and weights in the type of the arithmetic."""
    trained = [x.elements("rest", s) for s in x.leaves.values() if not s.frozen]
    yield Work(0, 4 * UPDATE * sum(trained), len(trained), "update")
    cast = [x.elements("rest", s) for s in x.leaves.values() if x.width_of(s) != 4]
    yield Work(0, (4 + x.width) * sum(cast), len(cast), "weights in the step's type")
