"""Which experts a token goes to, with which weights, and what keeps them evenly used. All in fp32.

Sources: top-k softmax: Shazeer 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088. Load-balance loss: Switch, Fedus 2021, arXiv 2101.03961,
equations 4 to 6. z-loss: ST-MoE, Zoph 2022, arXiv 2202.08906, equation 5. Sigmoid scores, a bias for selection alone, groups, and the loss
of each sequence: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Router(NamedTuple):
    """How tokens choose. top: experts of a token. score: what a logit becomes. normalize: whether a token's weights are made to sum to 1.
    groups, top_groups: experts lie in so many equal groups, of which a token uses the best few. scale: multiplies the weights."""

    experts: int
    top: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


class Choice(NamedTuple):
    """expert: int32 [tokens, top], the number of experts where a token is padding. weight: [tokens, top], 0 there. probs: [tokens, experts],
    scores that sum to 1 a token, 0 for padding. logsum: [tokens], logsumexp of the logits, 0 for padding."""

    expert: Array
    weight: Array
    probs: Array
    logsum: Array


SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
GROUP = {"softmax": lambda s: s.max(-1), "sigmoid": lambda s: lax.top_k(s, min(2, s.shape[-1]))[0].sum(-1)}
"""The worth of a group: of its best expert (DeepSeek-V2), or of its two best (V3)."""


def route(r: Router, logits: Array, bias: Array | None, valid: Array) -> Choice:
    """logits: fp32 [tokens, experts].  bias: [experts], added to the scores for the selection alone.  valid: bool [tokens], False for padding.
    Equal scores: the expert with the lower number goes first."""
    scores = SCORES[r.score](logits)
    wanted = lax.stop_gradient(scores if bias is None else scores + bias)
    if r.groups > 1:
        parts = wanted.reshape(*wanted.shape[:-1], r.groups, r.experts // r.groups)
        best = lax.top_k(GROUP[r.score](parts), r.top_groups)[1]
        inside = (best[..., None] == jnp.arange(r.groups)).any(-2)
        wanted = jnp.where(inside[..., None], parts, -jnp.inf).reshape(wanted.shape)
    expert = lax.top_k(wanted, r.top)[1].astype(jnp.int32)
    chosen = (expert[..., None] == jnp.arange(r.experts)).astype(scores.dtype)
    weight = jnp.einsum("nke,ne->nk", chosen, scores)
    if r.normalize:
        weight = weight / (weight.sum(-1, keepdims=True) + (1e-20 if r.score == "sigmoid" else 0))
    probs = scores if r.score == "softmax" else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    real = valid[:, None]
    return Choice(
        jnp.where(real, expert, r.experts),
        jnp.where(real, weight * r.scale, 0),
        jnp.where(real, probs, 0),
        jnp.where(valid, jax.nn.logsumexp(logits, axis=-1), 0),
    )


def load(choice: Choice, experts: int) -> Array:
    """Assignments to each expert, fp32 [experts]; exact up to 2^24."""
    return (choice.expert.reshape(-1, 1) == jnp.arange(experts)).sum(0).astype(jnp.float32)


def balance(load: Array, probs: Array, top: int) -> Array:
    """Tokens times the load-balance loss, which is 1 where all experts are used alike: experts x sum over experts of (share of the assignments)
    x (mean probability).  load: assignments [..., experts], of the whole batch. probs: summed probabilities [..., experts], of the same tokens or
    of a part of them: the loss of parts adds up to that of the whole.  No gradient flows through `load`.  Returns [...]."""
    load = lax.stop_gradient(load)
    return load.shape[-1] * (load * probs).sum(-1) / jnp.maximum(load.sum(-1), 1)


def rebalanced(bias: Array, load: Array, rate: float) -> Array:
    """The selection's bias after a step: up by `rate` for experts with less than the mean load, down for those with more.
    bias, load: [..., experts].  Source: Wang 2024, arXiv 2408.15664, algorithm 1."""
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
