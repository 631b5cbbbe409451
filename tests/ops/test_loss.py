"""Cross-entropy against its textbook form: values, gradients, split vocabulary, odd sizes, null model."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.ops import loss

N, D, VOCAB, ROWS = 37, 16, 257, 384


def inputs(dtype=jnp.float32):
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(a, (N, D), dtype)
    head = jax.random.normal(b, (ROWS, D), dtype)
    return x, head, jax.random.randint(c, (N,), 0, VOCAB), (jax.random.uniform(d, (N,)) < 0.7).astype(jnp.float32)


def textbook(x, head, targets, weights, z_loss):
    logits = (x @ head.T)[:, :VOCAB]
    lse = jax.nn.logsumexp(logits, -1)
    nll = lse - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
    return (weights * (nll + z_loss * lse**2)).sum()


def close(got, want, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=tolerance * float(np.abs(b).max()), rtol=0)


@pytest.mark.parametrize("chunks", [1, 3, 8, 100])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_value_and_gradient(chunks, z_loss):
    x, head, targets, weights = inputs()
    want = jax.value_and_grad(textbook, (0, 1))(x, head, targets, weights, z_loss)
    total = lambda x, h: loss.cross_entropy(x, h, targets, weights, vocab=VOCAB, chunks=chunks, z_loss=z_loss).total
    close(jax.jit(jax.value_and_grad(total, (0, 1)))(x, head), want)


def test_sums():
    x, head, targets, weights = inputs()
    logits = (x @ head.T)[:, :VOCAB]
    targets = targets.at[:9].set(logits.argmax(-1)[:9])
    sums = loss.cross_entropy(x, head, targets, weights, vocab=VOCAB, z_loss=0.5)
    lse = jax.nn.logsumexp(logits, -1)
    close(sums.square, (weights * lse**2).sum())
    close(sums.nll, textbook(x, head, targets, weights, 0.0))
    close(sums.total, sums.nll + 0.5 * sums.square)
    assert sums.correct == (weights * (logits.argmax(-1) == targets)).sum() >= 1


def test_uniform_model_has_perplexity_of_the_true_vocabulary():
    x, head, targets, _ = inputs()
    nll = loss.cross_entropy(x, 0 * head, targets, jnp.ones(N), vocab=VOCAB).nll / N
    assert abs(float(nll) - math.log(257)) < 1e-6
    close(loss.log_probs(x, 0 * head, targets, vocab=VOCAB), np.full(N, -math.log(257)))


def test_rows_without_weight_have_no_effect():
    x, head, targets, weights = inputs()
    f = jax.value_and_grad(lambda x, h, t: loss.cross_entropy(x, h, t, weights, vocab=VOCAB, z_loss=1e-3).total, (0, 1))
    off = weights == 0
    value, (dx, dhead) = f(x, head, targets)
    value2, (_, dhead2) = f(jnp.where(off[:, None], 7.0, x), head, jnp.where(off, 0, targets))
    assert value == value2 and (dhead == dhead2).all() and (dx[off] == 0).all()
    assert (dhead[VOCAB:] == 0).all()


def on_mesh(f, specs, out):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_split_vocabulary_equals_one_device(z_loss):
    x, head, targets, weights = (jnp.concatenate([a, a[:1]]) if a.shape[0] == N else a for a in inputs())
    want = jax.value_and_grad(textbook, (0, 1))(x, head, targets, weights, z_loss)

    def total(x, head, targets, weights):
        sums = loss.cross_entropy(x, head, targets, weights, vocab=VOCAB, axes=("tensor",), chunks=3, z_loss=z_loss)
        return jax.lax.psum(sums.total, "data")

    f = on_mesh(total, (P("data"), P("tensor"), P("data"), P("data")), P())
    close(jax.value_and_grad(f, (0, 1))(x, head, targets, weights), want)

    def logs(x, head, targets):
        return loss.log_probs(x, head, targets, vocab=VOCAB, axes=("tensor",), chunks=3)

    f = on_mesh(logs, (P("data"), P("tensor"), P("data")), P("data"))
    want = jnp.take_along_axis(jax.nn.log_softmax((x @ head.T)[:, :VOCAB]), targets[:, None], 1)[:, 0]
    close(f(x, head, targets), want)
    plain = lambda x, h: jnp.take_along_axis(jax.nn.log_softmax((x @ h.T)[:, :VOCAB]), targets[:, None], 1)[:, 0]
    close(
        jax.grad(lambda x, h: (f(x, h, targets) * weights).sum(), (0, 1))(x, head),
        jax.grad(lambda x, h: (plain(x, h) * weights).sum(), (0, 1))(x, head),
    )


def test_no_gradient_work_unless_asked():
    x, head, targets, weights = inputs()
    f = jax.jit(lambda x, h: loss.cross_entropy(x, h, targets, weights, vocab=VOCAB).total)
    dots = lambda g: g.lower(x, head).as_text().count("dot_general")
    assert dots(f) == 1
    assert dots(jax.jit(jax.value_and_grad(f, (0, 1)))) == 3


def test_bfloat16():
    x, head, targets, weights = inputs(jnp.bfloat16)
    got = jax.value_and_grad(lambda x, h: loss.cross_entropy(x, h, targets, weights, vocab=VOCAB).total, (0, 1))(x, head)
    wide = x.astype(jnp.float32), head.astype(jnp.float32)
    close(got, jax.value_and_grad(textbook, (0, 1))(*wide, targets, weights, 0.0), 2e-2)
    assert [g.dtype for g in got[1]] == [jnp.bfloat16] * 2 and got[0].dtype == jnp.float32


def test_chunk_count():
    assert loss.chunk_count(2048, 8192) == 4
    assert loss.chunk_count(100, 8192) == 1
    assert loss.chunk_count(16384, 128256) == 64 and loss.chunk_count(16384, 128256, "gpu") == 16
