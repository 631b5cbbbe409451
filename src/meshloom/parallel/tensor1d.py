"""Tensor parallelism, 1D: attention heads, MLP width and vocabulary are split.  Source: Shoeybi et al. 2019, arXiv 1909.08053.

In[b, t, d] . W[d, f_tensor] -> [b, t, f_tensor] . W[f_tensor, d] -> partial sums, all-reduced.  Memory: matrices / n.
Traffic a layer: one all-reduce of [batch, seq, embed] after attention and one after the MLP, forward, and two backward; one more each way for
the embedding and the head; three numbers a token for the vocabulary-parallel cross-entropy.
Key/value heads that do not divide are kept whole on every device, and each query head takes its own.
"""

from meshloom.core.layout import Layout
from meshloom.core.leaf import split_seq
from meshloom.ops.loss import chunk_count
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge, ordered

SPLIT = {"heads": ("tensor",), "kv_heads": ("tensor",), "ffn": ("tensor",), "expert_ffn": ("tensor",), "vocab": ("tensor",)}


def layout(n: int) -> Layout:
    """Heads, ffn and vocab over mesh axis `tensor`, in every table."""
    return Layout({"tensor": n}, rest=SPLIT, step=SPLIT, live=SPLIT, grad=SPLIT, acts=SPLIT)


def check(c, seq: int, asked: Asked) -> None:
    """Refuses heads, ffn or vocabulary that the devices do not divide."""
    n = asked.devices
    for name, size in (("heads", c.heads), ("ffn", c.ffn), ("padded vocabulary rows", c.vocab_padded)):
        if size % n:
            raise ValueError(f"{size} {name} cannot be split over tensor={n} devices. Use tensor= one of {divisors(size)}.")


def cost(x: Shapes) -> tuple[Collective, ...]:
    """All-reduces of [batch, seq, embed]: two a layer forward, two backward, one for the embedding, one for the head backward (a remat adds the
    first half's again under `full`). Three fp32 numbers a token for the loss. Once a step the gradients of what every device holds whole."""
    layers, size = x.layers, x.residual
    again = layers if x.remat == "full" and not x.parallel else 0
    residual = (
        ((not x.parallel) * layers, "layer", "out of a layer's halves"),
        ((1 + x.parallel) * layers, "layer end", "out of a layer's halves"),
        (2 * layers, "layer back", "into a layer's halves, backward"),
        (again, "layer again", "out of a layer's first half, recomputed"),
        (x.ends, "embed", "the embedding"),
        (x.ends, "head back", "the head, backward"),
    )
    streams = [Collective("all-reduce", ("tensor",), x.micro * n, x.micro * n * size, place, why) for n, place, why in residual]
    return merge([*([] if split_seq(x.layout) else streams), *loss(x, "tensor"), *gradient_sums(x, "tensor")])


def loss(x: Shapes, axis: str) -> list[Collective]:
    """The vocabulary-parallel cross-entropy: a maximum, then two sums, of each token's fp32 numbers, a chunk of tokens at a time.
    axis: the outermost that splits the vocabulary tells it; of others there is nothing."""
    axes = ordered(x.layout, x.layout.acts["vocab"])
    if axes[0] != axis:
        return []
    tokens = x.rows * x.seq // x.layout.size(x.layout.inner)
    chunks = min(chunk_count(tokens, x.config.vocab_padded // x.layout.size(axes), x.layout.platform), tokens)
    padded = -(-tokens // chunks) * chunks
    count = x.micro * chunks
    return [
        Collective("all-reduce", axes, count, x.micro * padded * 4, "head", "the loss: largest logit"),
        Collective("all-reduce", axes, count, x.micro * padded * 8, "head", "the loss: sum of exponentials, target's logit"),
    ]


TENSOR = Strategy("tensor", layout, check, cost, "heads, MLP width and vocabulary are split")
