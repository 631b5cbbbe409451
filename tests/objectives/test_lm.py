"""The language-modelling loss: sums, never means, and only of what is scored."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.core.batch import Batch
from meshloom.core.layout import ONE_DEVICE
from meshloom.core.spec import init
from meshloom.models.table import MODELS
from meshloom.objectives.lm import Bound, evaluate, lm
from meshloom.runner.forward import logits
from meshloom.runner.run import How
from tiny import recipe

SEQ = 8


def bound(tmp_path, vocab=257, **over):
    c = recipe(tmp_path).model.config.model_copy(update={"vocab": vocab, **over})
    return Bound(MODELS["llama"], c, ONE_DEVICE, How())


def rows(vocab: int, weights) -> Batch:
    tokens = jax.random.randint(jax.random.key(0), (2, SEQ + 1), 0, vocab)
    ones = jnp.ones((2, SEQ), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ))
    return Batch(tokens[:, :-1], tokens[:, 1:], jnp.asarray(weights, jnp.float32), ones, places, jnp.arange(2))


def test_uniform_model_gives_log_of_the_vocabulary(tmp_path):
    """C34, C77: 257 tokens padded to 384 rows: ln 257 a token, no padding row in the softmax."""
    b = bound(tmp_path)
    w = jax.tree.map(jnp.zeros_like, init(b.model.specs(b.config), jax.random.key(0)))
    _, sums = evaluate(b, lm(), w, jax.tree.map(lambda _: None, w), rows(257, np.ones((2, SEQ))), None)
    assert float(sums["loss"] / sums["tokens"]) == pytest.approx(math.log(257), rel=1e-6)
    assert w.embed.shape[0] == 384


def test_sums_over_scored_tokens_alone(tmp_path):
    """The sum is that of the log-probabilities of the scored targets, and z_loss adds its part."""
    b = bound(tmp_path)
    w = init(b.model.specs(b.config), jax.random.key(1))
    weights = np.zeros((2, SEQ))
    weights[0, 3:6], weights[1, 7] = 1, 1
    batch = rows(257, weights)
    total, sums = evaluate(b, lm(0.5), w, jax.tree.map(lambda _: None, w), batch, None)
    z = np.asarray(logits(b.model, b.config, w, batch.tokens), np.float64)
    log_z = np.log(np.exp(z).sum(-1))
    nll = (log_z - np.take_along_axis(z, np.asarray(batch.targets)[..., None], -1)[..., 0]) * weights
    assert float(sums["loss"]) == pytest.approx(nll.sum(), rel=1e-5)
    assert float(sums["tokens"]) == 4
    assert float(total) == pytest.approx(nll.sum() + 0.5 * (log_z**2 * weights).sum(), rel=1e-5)


def test_unscored_targets_do_not_matter(tmp_path):
    b = bound(tmp_path)
    w = init(b.model.specs(b.config), jax.random.key(1))
    weights = np.ones((2, SEQ))
    weights[:, -1] = 0
    batch = rows(257, weights)
    other = dataclasses.replace(batch, targets=batch.targets.at[:, -1].set(5))
    none = jax.tree.map(lambda _: None, w)
    assert float(evaluate(b, lm(), w, none, batch, None)[0]) == float(evaluate(b, lm(), w, none, other, None)[0])
