"""Language-model head and cross-entropy in one, a chunk of tokens at a time, with the vocabulary whole or split over mesh axes.

The loss is the last thing that a model does, so the gradient is made in the forward pass: logits exist for one chunk only and are computed
once. The label's part is a comparison inside the pass that makes the chunk's gradient; there is no one-hot array.  Source: a split
vocabulary is Megatron-LM's, Shoeybi 2019, arXiv 1909.08053, section 3; z-loss: PaLM, Chowdhery 2022, arXiv 2204.02311, section 5.

Collectives over the axes of a split vocabulary, per call with n tokens a device, c chunks: c all-reduces (maximum) of ceil(n/c) fp32 and c
all-reduces (sum) of 2 ceil(n/c) fp32, in the forward pass; none in the backward pass.  The gradient of x leaves as each device's part of
the sum: if x came in equal on those axes, its mark as varying (`vary`) adds one all-reduce of x's size in the transpose; if x came from a
gather over them, the gather's transpose does.  The head's gradient is likewise summed once, over the tokens' axes, by its own mark."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.leaf import sum_over
from meshloom.core.vary import vary, varying
from meshloom.ops.mask import LOW


class LossSums(NamedTuple):
    """Sums over this device's tokens, fp32, to be added over devices and divided once by the global count of weights."""

    total: Array
    """nll + z_loss * square: the one that has a gradient."""
    nll: Array
    """Sum of weight * negative log-probability of the target, nats."""
    square: Array
    """Sum of weight * logsumexp(logits) ** 2."""
    correct: Array
    """Sum of weight where the target's logit is the largest (a tie counts)."""


CHUNK_BYTES = {"cpu": 16 << 20}
"""Most bytes of one chunk's fp32 logits, by platform: a CPU's caches like few; elsewhere ELSEWHERE, since a small product leaves a GPU idle."""
ELSEWHERE = 512 << 20


def chunk_count(tokens: int, vocab: int, platform: str = "cpu") -> int:
    """Number of chunks that keeps the fp32 logits of one below the platform's limit, as far as 256 tokens a chunk allow.
    tokens, vocab: on this device."""
    limit = CHUNK_BYTES.get(platform, ELSEWHERE)
    return max(1, min(math.ceil(tokens * vocab * 4 / limit), tokens // 256))


def cross_entropy(
    x: Array, head: Array, targets: Array, weights: Array, *, vocab: int, axes: tuple[str, ...] = (), chunks: int = 8, z_loss: float = 0.0
) -> LossSums:
    """Weighted sums of the loss of logits = x @ head.T.  x: [n, d].  head: [v_local, d]: this device's rows of the vocabulary's table,
    padded at its end; rows from `vocab` (the true size) on never enter the softmax.  targets: [n] ids below vocab (anything where the
    weight is 0).  weights: [n], no gradient.  Both equal on the devices of `axes`, the mesh axes that split the vocabulary (() for none).
    chunks: of the tokens.  z_loss: coefficient.  Only `total` has a gradient; it is computed only if asked for."""
    split = frozenset(axes)
    marks = frozenset().union(*(varying(a) for a in (x, head, targets, weights))) | split
    weights = lax.stop_gradient(weights).astype(jnp.float32)
    # targets and weights are equal on the vocabulary's devices and stay unmarked there, so the sums come out equal too
    targets, weights = (vary(a, marks - split) for a in (targets, weights))
    sums = _cross_entropy(vary(x, marks), vary(head, marks), targets, weights, vocab, axes, min(chunks, x.shape[0]), z_loss)
    return LossSums(sums[0], *(lax.stop_gradient(s) for s in sums[1:]))  # type: ignore  # custom_vjp hides its result


def log_probs(x: Array, head: Array, targets: Array, *, vocab: int, axes: tuple[str, ...] = (), chunks: int = 8) -> Array:
    """Natural log of each target's probability, [n] fp32; arguments as for `cross_entropy`.  Differentiable; the backward pass
    computes each chunk's logits again.  Collectives: as for `cross_entropy`, and the same again in the backward pass."""
    marks = frozenset(axes).union(*(varying(a) for a in (x, head, targets)))
    n, (x, head, targets) = x.shape[0], (vary(a, marks) for a in (x, head, targets))

    @jax.checkpoint
    def chunk(part):
        logits = _logits(part[0], head, vocab, axes)
        top = _pmax(lax.stop_gradient(logits).max(-1), axes)
        own, local = _local(part[1], head.shape[0], axes)
        label = jnp.where(own, _pick(logits, local), 0)
        summed = sum_over(jnp.stack([jnp.exp(logits - top[:, None]).sum(-1), label]), axes)
        return summed[1] - top - jnp.log(summed[0])

    return lax.map(chunk, _cut((x, targets), min(chunks, n))).reshape(-1)[:n]


def _pmax(x: Array, axes: tuple[str, ...]) -> Array:
    return lax.pmax(x, axes) if axes else x


def _cut(arrays: tuple[Array, ...], chunks: int) -> tuple[Array, ...]:
    """Each [n, ...] as [chunks, ceil(n / chunks), ...], zeros at the end."""
    n = arrays[0].shape[0]
    size = math.ceil(n / chunks)
    pad = size * chunks - n
    return tuple(jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)).reshape(chunks, size, *a.shape[1:]) for a in arrays)


def _local(targets: Array, size: int, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """(whether this device holds the target's row, its number here).  size: rows a device."""
    local = targets - (lax.axis_index(axes) * size if axes else 0)
    own = (local >= 0) & (local < size)
    return own, jnp.where(own, local, 0)


def _pick(logits: Array, local: Array) -> Array:
    return jnp.take_along_axis(logits, local[:, None], 1)[:, 0]


def _logits(x: Array, head: Array, vocab: int, axes: tuple[str, ...]) -> Array:
    """fp32 logits [n, v_local] with padding rows' at -1e30."""
    logits = lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    size = head.shape[0]
    if not axes and size == vocab:
        return logits
    first = lax.axis_index(axes) * size if axes else 0
    return jnp.where(first + jnp.arange(size) < vocab, logits, LOW)


def _chunk_sums(x, head, targets, weights, vocab, axes, z_loss):
    """(LossSums as [4], row factors [n], exponentials [n, v_local], own [n], local [n]): what both passes need of one chunk."""
    logits = _logits(x, head, vocab, axes)
    own, local = _local(targets, head.shape[0], axes)
    here = logits.max(-1)
    top = _pmax(here, axes)
    e = jnp.exp(logits - here[:, None])
    fix = jnp.exp(here - top)
    z, label = sum_over(jnp.stack([e.sum(-1) * fix, jnp.where(own, _pick(logits, local), 0)]), axes)
    lse = top + jnp.log(z)
    nll, square = (weights * (lse - label)).sum(), (weights * lse * lse).sum()
    sums = jnp.stack([nll + z_loss * square, nll, square, (weights * (label >= top)).sum()])
    return sums, weights * (1 + 2 * z_loss * lse) * fix / z, e, own, local


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _cross_entropy(x, head, targets, weights, vocab, axes, chunks, z_loss):
    """The four sums, without any gradient's work."""

    def chunk(sums, part):
        return sums + _chunk_sums(part[0], head, *part[1:], vocab, axes, z_loss)[0], None

    start = vary(jnp.zeros(4), varying(x) - frozenset(axes))
    return lax.scan(chunk, start, _cut((x, targets, weights), chunks))[0]


def _forward(x, head, targets, weights, vocab, axes, chunks, z_loss):
    """The sums and both gradients.  The head's is added up as [d, v_local], the faster product on a CPU (98 against 75 GFLOP/s a core)."""

    def chunk(carry, part):
        sums, dhead = carry
        xc, targets, weights = part
        new, factor, e, own, local = _chunk_sums(xc, head, targets, weights, vocab, axes, z_loss)
        label = jnp.where(own, local, -1)[:, None] == jnp.arange(head.shape[0])
        dlogits = (e * factor[:, None] - jnp.where(label, weights[:, None], 0)).astype(x.dtype)
        dx = lax.dot_general(dlogits, head, (((1,), (0,)), ((), ()))).astype(x.dtype)
        return (sums + new, dhead + lax.dot_general(xc, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)), dx

    start = vary(jnp.zeros(4), varying(x) - frozenset(axes)), vary(jnp.zeros(head.shape[::-1]), varying(head))
    (sums, dhead), dx = lax.scan(chunk, start, _cut((x, targets, weights), chunks))
    return sums, (dx.reshape(-1, x.shape[1])[: x.shape[0]], dhead.T.astype(head.dtype))


def _backward(vocab, axes, chunks, z_loss, kept, dsums):
    dx, dhead = kept
    return (dx * dsums[0]).astype(dx.dtype), (dhead * dsums[0]).astype(dhead.dtype), None, None


_cross_entropy.defvjp(_forward, _backward)
