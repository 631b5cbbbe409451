"""From logits to the next token: what a request asks for, and the order in which it is applied.

The order is that of `transformers`: repetition penalty, least number of tokens, temperature, top-k, top-p; then the draw.
Each request has its own key, from its own seed and the number of the token in its answer, so its draws do not depend on its batch.
Source: repetition penalty: Keskar 2019, arXiv 1909.05858, section 4.1; top-p: Holtzman 2019, arXiv 1904.09751, section 3.1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import model_validator

from meshloom.core.config import Section
from meshloom.core.tree import pytree

NEVER = -jnp.inf
"""Logit of a token that may not be drawn."""


class Sampling(Section):
    """How one request wants its text."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token always."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities reach p; 1 draws from all."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that are in the text already are divided by this, negative ones multiplied; 1 changes nothing."""
    tokens: int = 128
    """New tokens, at most."""
    min_tokens: int = 0
    """No end token before there are so many new tokens."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these that appears in it."""
    ignore_end: bool = False
    """End tokens are tokens like others."""
    seed: int = 0
    """Decides the draws. The i-th prompt of a call has seed + i, alone or beside others."""

    @model_validator(mode="after")
    def _check(self) -> "Sampling":
        refused = (
            (
                not self.temperature >= 0,
                f"temperature {self.temperature} is negative. Use 0 for the likeliest token, or a positive number.",
            ),
            (self.top_k < 0, f"top_k {self.top_k} is negative. Use 0 to draw from all tokens."),
            (not 0 < self.top_p <= 1, f"top_p {self.top_p} is not above 0 and at most 1. Use 1 to draw from all tokens."),
            (not self.repetition_penalty > 0, f"repetition_penalty {self.repetition_penalty} is not positive. Use 1 for none."),
            (self.tokens < 1, f"tokens {self.tokens} asks for no text. Use at least 1."),
            (self.min_tokens < 0, f"min_tokens {self.min_tokens} is negative. Use 0 for no least number."),
            (
                self.min_tokens > self.tokens,
                f"min_tokens {self.min_tokens} is more than tokens {self.tokens}. Lower one or raise the other.",
            ),
            ("" in self.stop, "A stop string is empty, and would end every text at once. Remove it."),
            (not 0 <= self.seed < 2**32, f"seed {self.seed} is not in 0 to {2**32 - 1}. Choose one that is."),
        )
        for wrong, sentence in refused:
            if wrong:
                raise ValueError(sentence)
        return self


class Uses(NamedTuple):
    """What any request of a batch needs: decides what is compiled, so that greedy decoding never sorts a vocabulary."""

    draw: bool
    cut: bool
    penalty: bool
    least: bool


@pytree
class Wants:
    """What each row of a batch asks for, [batch] each. ends: [batch, n] token ids that end the row, padded with an id that no token has."""

    temperature: Array
    top_k: Array
    top_p: Array
    penalty: Array
    seed: Array
    tokens: Array
    least: Array
    ends: Array


def uses(requests: Sequence[Sampling]) -> Uses:
    """The features that a batch needs."""
    drawn = [s for s in requests if s.temperature > 0]
    return Uses(
        draw=bool(drawn),
        cut=any(s.top_k > 0 or s.top_p < 1 for s in drawn),
        penalty=any(s.repetition_penalty != 1 for s in requests),
        least=any(s.min_tokens > 0 and not s.ignore_end for s in requests),
    )


def wants(requests: Sequence[Sampling], ends: Sequence[int], vocab: int) -> Wants:
    """The requests as host arrays.  ends: token ids that end a text.  vocab: tokens that exist."""
    none = [vocab] * max(1, len(ends))
    rows = [none if s.ignore_end or not ends else list(ends) for s in requests]
    f32, i32 = (lambda xs: np.array(xs, np.float32)), (lambda xs: np.array(xs, np.int32))
    return Wants(
        temperature=f32([s.temperature for s in requests]),
        top_k=i32([s.top_k for s in requests]),
        top_p=f32([s.top_p for s in requests]),
        penalty=f32([s.repetition_penalty for s in requests]),
        seed=np.array([s.seed for s in requests], np.uint32),
        tokens=i32([s.tokens for s in requests]),
        least=i32([s.min_tokens for s in requests]),
        ends=i32(rows),
    )


def choose(logits: Array, w: Wants, use: Uses, made: Array, seen: Array) -> Array:
    """The next token of each row, int32 [batch].  logits: fp32 [batch, vocab], tokens that exist only.  made: [batch] new tokens so far.
    seen: bool [batch, vocab], the tokens of prompt and answer (any shape unless use.penalty)."""
    if use.penalty:
        logits = penalised(logits, seen, w.penalty)
    if use.least:
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = jnp.where((made < w.least)[:, None], logits.at[rows, w.ends].set(NEVER, mode="drop"), logits)
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    if not use.draw:
        return best
    scaled = logits / jnp.where(w.temperature > 0, w.temperature, 1)[:, None]
    if use.cut:
        scaled = cut(scaled, w.top_k, w.top_p)
    return jnp.where(w.temperature > 0, draw(scaled, w.seed, made), best)


def penalised(logits: Array, seen: Array, penalty: Array) -> Array:
    """Logits of seen tokens made smaller: divided by the penalty where positive, multiplied where negative."""
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def cut(logits: Array, top_k: Array, top_p: Array) -> Array:
    """Logits with the tokens that top-k, then top-p, leave out at NEVER.  All of equal k-th logits stay; at least one token does.
    Row values of top_k 0 and top_p 1 change nothing."""
    vocab = logits.shape[-1]
    order = jnp.argsort(logits, -1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, order, -1)
    last = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab) - 1
    floor = jnp.take_along_axis(ranked, last[:, None], -1)
    ranked = jnp.where(ranked < floor, NEVER, ranked)
    p = jax.nn.softmax(ranked, -1)
    before = jnp.cumsum(p, -1) - p
    keep = ((before < top_p[:, None]) | (top_p >= 1)[:, None]) & (ranked > NEVER)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.where(jnp.zeros(logits.shape, bool).at[rows, order].set(keep), logits, NEVER)


def draw(logits: Array, seed: Array, made: Array) -> Array:
    """One token a row, with probability softmax(logits), by a key from the row's seed and the number of the token."""

    def one(row: Array, seed: Array, made: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), made), row)

    return jax.vmap(one)(logits, seed, made).astype(jnp.int32)


def log_prob(logits: Array, token: Array) -> Array:
    """Natural log of each row's token's probability under the raw model: before penalty, temperature and cuts."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits, -1), token[:, None], -1)[:, 0]
