"""Tensor parallelism, 1D: attention heads, MLP width and vocabulary are split.  Source: Shoeybi et al. 2019, arXiv 1909.08053.

In[b, t, d] . W[d, f_tensor] -> [b, t, f_tensor] . W[f_tensor, d] -> partial sums, all-reduced.  Memory: matrices / n.
Traffic a layer: one all-reduce of [batch, seq, embed] after attention and one after the MLP, forward, and two backward; one more each way for
the embedding and the head; three numbers a token for the vocabulary-parallel cross-entropy.
Key/value heads that do not divide are kept whole on every device, and each query head takes its own.
"""

from meshloom.core.layout import Layout
from meshloom.parallel.base import Strategy, divisors

SPLIT = {"heads": ("tensor",), "kv_heads": ("tensor",), "ffn": ("tensor",), "vocab": ("tensor",)}


def layout(n: int) -> Layout:
    """Heads, ffn and vocab over mesh axis `tensor`, in every table."""
    return Layout({"tensor": n}, rest=SPLIT, step=SPLIT, live=SPLIT, grad=SPLIT, acts=SPLIT)


def check(c, seq: int, n: int) -> None:
    """Refuses heads, ffn or vocabulary that n does not divide."""
    for name, size in (("heads", c.heads), ("ffn", c.ffn), ("padded vocabulary rows", c.vocab_padded)):
        if size % n:
            raise ValueError(f"{size} {name} cannot be split over tensor={n} devices. Use tensor= one of {divisors(size)}.")


TENSOR = Strategy("tensor", layout, check, "heads, MLP width and vocabulary are split")
