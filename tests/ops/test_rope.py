"""Rotary tables and rotation against arrays saved from `transformers` (tests/goldens/make_rope.py), and the gradient."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.ops.rope import SCALINGS, Rope, apply, attention_factor, tables

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "rope.npz")
HEAD = 32
PLACES = {47: [0, 1, 7, 31, 47], 95: [0, 1, 17, 63, 95]}
CASES = {
    "default": Rope(),
    "default_theta": Rope(theta=500000.0),
    "linear": Rope(kind="linear", factor=4.0),
    "dynamic": Rope(kind="dynamic", factor=2.0, original=64),
    "llama3": Rope(kind="llama3", theta=500000.0, factor=8.0, original=64),
    "yarn": Rope(kind="yarn", factor=4.0, original=64),
    "yarn_untruncated": Rope(kind="yarn", theta=1e6, factor=4.0, original=128, truncate=False, beta_fast=16.0, beta_slow=2.0),
    "yarn_mscale": Rope(kind="yarn", factor=40.0, original=64, mscale=1.0, mscale_all_dim=0.8),
    "yarn_factor": Rope(kind="yarn", factor=4.0, original=64, attention_factor=1.3),
    "partial": Rope(partial=0.25),
}


def test_every_scaling_has_a_golden():
    assert {r.kind for r in CASES.values()} == set(SCALINGS)
    assert {name.split("/")[0] for name in GOLDEN} == {*CASES, "x"}


@pytest.mark.parametrize("last", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name, last):
    cos, sin = tables(CASES[name], HEAD, jnp.array([PLACES[last]]))
    np.testing.assert_allclose(cos, GOLDEN[f"{name}/{last}/cos"], atol=2e-5)
    np.testing.assert_allclose(sin, GOLDEN[f"{name}/{last}/sin"], atol=2e-5)
    np.testing.assert_allclose(apply(GOLDEN["x"], cos, sin), GOLDEN[f"{name}/{last}/y"], atol=5e-5)


def test_dynamic_rows_do_not_touch_each_other():
    positions = jnp.stack([jnp.arange(40), jnp.arange(200, 240)])
    cos, _ = tables(CASES["dynamic"], HEAD, positions)
    alone, _ = tables(CASES["dynamic"], HEAD, positions[:1])
    assert (cos[:1] == alone).all()
    fixed, _ = tables(CASES["dynamic"], HEAD, positions[:1], length=240)
    assert not np.allclose(fixed, alone)


def test_positions_restart_with_a_document():
    cos, sin = tables(Rope(), HEAD, jnp.array([[0, 1, 2, 0, 1]]))
    assert (cos[0, :2] == cos[0, 3:]).all() and (sin[0, :2] == sin[0, 3:]).all()


def test_gradient_and_dtype():
    x = jnp.asarray(GOLDEN["x"])
    cos, sin = tables(CASES["partial"], HEAD, jnp.arange(5)[None])

    def plain(x):
        half = cos.shape[-1]
        a, b = x[..., :half], x[..., half : 2 * half]
        c, s = cos[:, :, None], sin[:, :, None]
        return jnp.concatenate([a * c - b * s, a * s + b * c, x[..., 2 * half :]], -1)

    got, want = (jax.grad(lambda x: jnp.square(f(x) + 1).sum())(x) for f in (lambda x: apply(x, cos, sin), plain))  # noqa: B023
    np.testing.assert_allclose(got, want, atol=2e-6 * float(jnp.abs(want).max()))
    assert apply(x.astype(jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


def test_attention_factor():
    assert attention_factor(Rope(kind="llama3", factor=8.0)) == 1.0
    assert attention_factor(Rope(kind="yarn", factor=1.0)) == 1.0


def test_refuses_unknown_scaling():
    with pytest.raises(ValueError, match="'yarn'"):
        Rope(kind="yern")
