"""Bytes of one layer's activations on one device: what its backward pass is kept, and what it works with.  By shapes; allocates nothing.

What is kept follows from what the layers' functions keep (their custom gradients) and from the rows of runner.run.REMAT; a test traces the step of
many layouts and compares to the byte.  What it works with is a sum of the same arrays, each times the number of copies that a compiler has at once
where its backward pass needs most: numbers of the table WORKING, fitted (benchmarks/plan_memory.py --fit).
"""

import math
from typing import NamedTuple

from meshloom.core.leaf import gathers, split_seq
from meshloom.core.remat import group_of, row_of
from meshloom.ops.attention import Case, choose
from meshloom.ops.blocks import block_size
from meshloom.parallel.base import Shapes, moved
from meshloom.parallel.expert import across


class Parts(NamedTuple):
    """Bytes of a layer's arrays on one device, in one micro-batch.

    stream: the residual stream. enters: what a product reads of it, gathered where a layout splits the stream. heads, keys: queries, or what
    attention makes; keys, or values. wide: what `up` and `gate` make. down: what the last product reads. scores: all that causal attention computes,
    fp32, where its exponentials are kept; else 0. block: of the largest block, fp32. outs: attention's result, fp32. numbers: one fp32 number a token.
    weights: the layer's own that are gathered for its run, and its gradients that are scattered after it, whole. shards: the device's parts of
    weights, where a layer gathers any. routed: rows of all experts, each with its embed; experts: their
    weights, those of a layer; 0 without.
    """

    stream: float
    enters: float
    heads: float
    keys: float
    wide: float
    down: float
    scores: float
    block: float
    outs: float
    numbers: float
    weights: float
    shards: float
    routed: float
    experts: float = 0


KEPT = {
    "full": Parts(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "selective": Parts(2, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "none": Parts(2, 2, 2, 2, 1, 1, 1, 0, 1, 2, 0, 1, 2, 0),
    "offload": Parts(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
}
"""How many of each a layer keeps, by what is kept: its input alone; also the results of its products, but the last; also what both norms make and one
number a token of each, attention's result as it is and, in fp32, in blocks, the exponentials of its scores, and the activation's result."""
LONG = {"none": Parts(2, 2, 1, 2, 1, 1, 0, 0, 1, 2, 0, 1, 2, 0)}
"""The same where attention goes by blocks of queries and keys: its result is kept once."""

WORKING = {
    ("cpu", "full"): Parts(5.3, 3.9, 2.6, 6.5, 3.5, 0, 2.1, 0, 0, 0, 0.1, 0, 9.4, 1.6),
    ("cpu", "selective"): Parts(0, 8.1, 4.1, 13.3, 1.2, 0, 1.7, 0, 0, 0, 0.3, 0, 9.4, 1.6),
    ("cpu", "offload"): Parts(0, 8.1, 4.1, 13.3, 1.2, 0, 1.7, 0, 0, 0, 0.3, 0, 9.4, 1.6),
    ("cpu", "none"): Parts(3.4, 2.8, 4.8, 9.7, 1.5, 0.4, 1.1, 0, 0, 0, 0.2, 0, 9.4, 1.6),
    ("gpu", "full"): Parts(4, 0, 2, 2, 2, 1, 0, 2, 0, 0, 1, 0, 4, 1),
    ("gpu", "selective"): Parts(4, 0, 2, 2, 1, 1, 0, 2, 0, 0, 1, 0, 4, 1),
    ("gpu", "offload"): Parts(4, 0, 2, 2, 2, 1, 0, 2, 0, 0, 1, 0, 4, 1),
    ("gpu", "none"): Parts(4, 0, 1, 1, 1, 0, 0, 2, 0, 0, 1, 0, 4, 1),
    ("tpu", "full"): Parts(0, 0, 0, 25.5, 0, 0, 0, 9.1, 0, 0, 0.4, 0, 9.4, 1.6),
    ("tpu", "selective"): Parts(0, 0, 0, 36.2, 0, 0, 0, 8.1, 0, 0, 0.3, 0, 9.4, 1.6),
    ("tpu", "offload"): Parts(0, 0, 0, 36.2, 0, 0, 0, 8.1, 0, 0, 0.3, 0, 9.4, 1.6),
    ("tpu", "none"): Parts(0, 0, 0, 36.2, 0, 0, 0, 8.1, 0, 0, 0.3, 0, 9.4, 1.6),
}
"""Copies at a time where the backward pass of a layer needs most, beside what it was kept, by platform and by what is kept. Fitted by
`python benchmarks/plan_memory.py --fit` to the compiled programs of benchmarks/plan_memory.jsonl; those of experts (the last two) by hand to three programs
of a CPU. They include what an allocator leaves between buffers. The other rows of TPUs
are those that `full` has without the programs of one device. Those of GPUs are an estimate by hand, of no program."""


def working_of(x: Shapes) -> int:
    """Bytes that the backward pass of one layer works with, beside what it was kept: what it computes again, gradients, a compiler's gaps.  x: of one
    word of remat; of a group all that the others of it compute again is there too."""
    row, found = row_of(x.remat), parts(x)
    platform = x.layout.platform if (x.layout.platform, row) in WORKING else "gpu"
    return total(found, WORKING[platform, row]) + (group_of(x.remat) - 1) * kept(x._replace(remat="none"))


def parts(x: Shapes) -> Parts:
    """The arrays of a layer, the average one where layers differ."""
    lay = x.layout
    passed = gathers(lay)
    inside = [s for s in x.leaves.values() if s.axes[0] == "layer"] if passed else []
    each = lambda table, leaves: sum(x.elements(table, s) // (s.shape[0] // lay.stages) * x.width_of(s) for s in leaves)
    passing = [s for table in ("step", "grad") for s in inside if moved(lay, table, "live", s)]
    experts = sum(x.layer(s) * x.width_of(s) for s in x.leaves.values() if "expert" in s.axes and s.axes[0] == "layer")
    return activations(x)._replace(weights=each("live", passing), shards=each("grad", inside), experts=experts)


def activations(x: Shapes) -> Parts:
    """The same without weights."""
    c, lay, width = x.config, x.layout, x.width
    tokens = x.rows * x.seq
    work = lay.size((*lay.acts.get("heads", ()), *lay.inner))
    enters = c.embed // lay.size(lay.stream if lay.square else lay.live.get("embed", ()))
    stream = c.embed // lay.size((*split_seq(lay), *lay.stream))
    heads = c.heads * c.head // work
    keys = c.kv_heads * c.head // lay.size((*lay.acts.get("kv_heads", ()), *lay.inner))
    rows = routed(x)
    wide = rows * 2 * c.expert_ffn if rows else tokens * x.wide
    down = rows * c.expert_ffn if rows else tokens * x.wide // (2 if x.wide == 2 * c.ffn else 1)
    every, block = scores(x)
    return Parts(
        stream=tokens * stream * width,
        enters=tokens * enters * width,
        heads=tokens * heads * width,
        keys=tokens * keys * width,
        wide=wide // work * width,
        down=down // work * width,
        scores=every,
        block=block,
        outs=tokens * heads * 4,
        numbers=tokens * 4 // lay.size(split_seq(lay)),
        weights=0,
        shards=0,
        routed=rows * c.embed * width,
        experts=0,
    )


def routed(x: Shapes) -> int:
    """Rows of the experts on one device: places for every token that may come there, or as many as a capacity leaves; 0 without experts."""
    c = x.config
    if not any(kind.tells for kind in x.kinds):
        return 0
    return x.rows * x.seq * c.top * x.layout.size(across(x.layout))


def scores(x: Shapes) -> tuple[int, int]:
    """(bytes of all scores that causal attention keeps the exponentials of, bytes of the scores of its largest block), fp32, on one device."""
    c, lay = x.config, x.layout
    heads = c.heads // lay.size((*lay.acts.get("heads", ()), *lay.exchange))
    seq = x.seq * lay.size(lay.exchange)
    row, block = kernel(x, heads, seq), block_size(seq, None)
    if row != "blocks":
        return 0, 0
    ends = [min(start + block, seq) for start in range(0, seq, block)]
    every = sum((end - start) * end for start, end in zip(range(0, seq, block), ends))
    each = x.rows * heads * 4 // lay.size(lay.inner)
    return every * each if seq <= 512 else 0, block * seq * each


def kernel(x: Shapes, heads: int, seq: int) -> str:
    """The row of ops.attention that serves a device's heads and tokens; "ring" where keys go around."""
    c, lay = x.config, x.layout
    if lay.ring:
        return "ring"
    window = any(kind.window is not None for kind in x.kinds)
    drops = c.attention_dropout > 0
    case = Case(
        lay.platform, seq, seq, heads, max(1, c.kv_heads * heads // c.heads), c.head, x.dtype, x.rows, window, x.packed, False, drops
    )
    return choose(case).name


def kept(x: Shapes) -> int:
    """Bytes of activations that one layer keeps on the device for its backward pass, by what `remat`, one word, keeps; a layer of a group its share."""
    row = row_of(x.remat)
    found = parts(x) if KEPT[row].shards else activations(x)
    if row == "none":  # keys that could not be split are kept as the device's own queries need them
        found = found._replace(keys=min(found.keys, found.heads))
    return total(found, KEPT[row] if found.block or row not in LONG else LONG[row]) // group_of(x.remat)


def total(found: Parts, copies: tuple[float, ...]) -> int:
    """Bytes of so many copies of each."""
    return math.ceil(sum(n * size for n, size in zip(copies, found, strict=True)))
