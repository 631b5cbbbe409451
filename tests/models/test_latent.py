"""Latent attention against the plain formula, with values narrower than keys, and its cache."""

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.layout import ONE_DEVICE
from meshloom.core.spec import init
from meshloom.models.base import KV, Ctx, Kind, Slots
from meshloom.models.deepseek import Config, rotary
from meshloom.models.latent import Latent, _sharper, attend
from meshloom.ops.rope import Rope

C = Config(
    layers=1,
    embed=8,
    heads=2,
    vocab=16,
    experts=2,
    top=1,
    key_rank=6,
    query_rank=5,
    nope_head=4,
    rope_head=2,
    value_head=3,
    interleaved=False,
)


def case():
    w = jax.tree.map(lambda a: a + 0.3 * jax.random.normal(jax.random.key(a.size), a.shape), init(Latent.specs(C), jax.random.key(0)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 8)), jnp.float32)
    where = jnp.broadcast_to(jnp.arange(5), (2, 5))
    return w, x, Ctx(jnp.ones((2, 5), jnp.int32), where, rotary(C, where), jnp.arange(2), None, 0, None, None)


def norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def test_is_the_formula() -> None:
    w, x, ctx = case()
    got, _ = attend(C, ONE_DEVICE, Kind(), w, x, ctx)
    w, x = jax.tree.map(np.asarray, w), np.asarray(x)
    q = np.einsum("bta,ahk->bthk", norm(x @ w.q_in, w.q_norm), w.q_out)
    narrow = x @ w.kv_in
    both = np.einsum("btz,zhu->bthu", norm(narrow[..., :6], w.kv_norm), w.kv_out)
    cos, sin = (np.asarray(a)[:, :, None] for a in ctx.rotary)
    turn = lambda a: np.concatenate([a[..., :1] * cos - a[..., 1:] * sin, a[..., 1:] * cos + a[..., :1] * sin], -1)
    q = np.concatenate([q[..., :4], turn(q[..., 4:])], -1)
    k = np.concatenate([both[..., :4], np.repeat(turn(narrow[..., None, 6:]), 2, 2)], -1)
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(6)
    scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bhts,bshw->bthw", p / p.sum(-1, keepdims=True), both[..., 4:])
    np.testing.assert_allclose(got, np.einsum("bthw,hwd->btd", y, w.o), rtol=1e-4, atol=1e-5)


def test_tokens_one_by_one_see_the_cache() -> None:
    w, x, ctx = case()
    whole, _ = attend(C, ONE_DEVICE, Kind(), w, x, ctx)
    cache = KV(*[jnp.zeros((2, 5, 2, 6))] * 2)
    for t in range(5):
        seen = jnp.broadcast_to((jnp.arange(5) <= t).astype(jnp.int32), (2, 5))
        slots = Slots(jnp.int32(t), seen, jnp.broadcast_to(jnp.arange(5), (2, 5)))
        at = ctx.positions[:, t : t + 1]
        one = Ctx(jnp.ones((2, 1), jnp.int32), at, rotary(C, at), ctx.samples, None, 0, cache, slots)
        y, cache = attend(C, ONE_DEVICE, Kind(), w, x[:, t : t + 1], one)
        np.testing.assert_allclose(y[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)


def test_a_stretched_yarn_sharpens() -> None:
    assert _sharper(Rope()) == 1
    np.testing.assert_allclose(_sharper(Rope(kind="yarn", factor=40.0, original=16, mscale_all_dim=1.0)), (0.1 * np.log(40) + 1) ** 2)
