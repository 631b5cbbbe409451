"""Tokens to experts on other devices and back, both modes: values and gradients of the reference, and the collectives that each says it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import ONE_DEVICE
from meshloom.core.mesh import make_mesh
from meshloom.core.vary import vary
from meshloom.ops import dispatch
from meshloom.ops.moe import reference
from meshloom.parallel.expert import EXPERT, folded
from meshloom.parallel.tensor1d import TENSOR
from meshloom.plan.hlo import collectives, total
from programs import QUICK

TOKENS, TOP, EXPERTS, EMBED, FFN, ROWS = 32, 2, 8, 6, 4, 4
PLAIN, BOTH = EXPERT.layout(4), EXPERT.layout(2) | TENSOR.layout(2)
LAYOUTS = {"expert=4": PLAIN, "expert=2 tensor=2": BOTH, "expert=2:folded tensor=2": folded(BOTH)}
MODES = ("dropless", "capacity")


@functools.cache
def case():
    rng = np.random.default_rng(0)
    expert = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(TOKENS)]).astype(np.int32)
    expert[::9] = EXPERTS
    weight = np.where(expert < EXPERTS, rng.random((TOKENS, TOP)), 0).astype(np.float32)
    shapes = (TOKENS, EMBED), (EXPERTS, EMBED, FFN), (EXPERTS, EMBED, FFN), (EXPERTS, FFN, EMBED)
    return expert, weight, *(0.5 * rng.standard_normal(s, np.float32) for s in shapes)


def loss(lay, mode, expert, weight, x, *w):
    """A sum over this device's tokens. Partial results are added over the devices that hold the same tokens."""
    x, weight = vary(x, lay.work), vary(weight, lay.work)
    if mode == "dropless":
        y = dispatch.dropless(lay, x, expert, weight, *w)
    else:
        y, _ = dispatch.capacity(lay, ROWS // lay.size(lay.tokens), TOKENS // ROWS, x, expert, weight, *w)
    y = jax.lax.psum(y, lay.work) if lay.work else y
    return jnp.sum(jnp.sin(y))


def program(lay, mode):
    """Loss and gradients of tokens, weights and matrices."""

    def local(expert, weight, x, *w):
        value, grads = jax.value_and_grad(functools.partial(loss, lay, mode), (1, 2, 3, 4, 5))(expert, weight, x, *w)
        return jax.lax.psum(value, lay.tokens) if lay.tokens else value, grads

    if lay.devices == 1:
        return jax.jit(local)
    rows = P(lay.tokens)
    w = [lay.partition("rest", axes) for axes in (("expert", "embed", "expert_ffn"),) * 2 + (("expert", "expert_ffn", "embed"),)]
    return jax.jit(jax.shard_map(local, mesh=make_mesh(lay), in_specs=(rows, rows, rows, *w), out_specs=(P(), (rows, rows, *w))))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_every_expert_on_every_token(name: str, mode: str) -> None:
    expert, *rest = case()
    value, grads = program(LAYOUTS[name], mode)(expert, *rest)
    plain = lambda weight, x, *w: jnp.sum(jnp.sin(reference(x, expert, weight, *w)))
    want, wanted = jax.value_and_grad(plain, (0, 1, 2, 3, 4))(*rest)
    mask = (expert < EXPERTS).astype(np.float32)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for a, b in zip((grads[0] * mask, *grads[1:]), (wanted[0] * mask, *wanted[1:])):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_capacity_goes_all_to_all_four_times(name: str) -> None:
    lay = LAYOUTS[name]
    text = program(lay, "capacity").lower(*case()).compile(compiler_options=QUICK).as_text()
    owned = EXPERTS // (2 if "folded" in name else 1)
    size = owned * (ROWS // lay.size(lay.tokens)) * (TOKENS // ROWS) * EMBED * 4
    assert total(collectives(text, lay.sizes))["all-to-all", ("expert",)] == (4, 4 * size)


def test_dropless_gathers_and_scatters() -> None:
    text = program(PLAIN, "dropless").lower(*case()).compile(compiler_options=QUICK).as_text()
    found = total(collectives(text, PLAIN.sizes))
    rows, choices = TOKENS * EMBED * 4, TOKENS * TOP * 4
    assert found["all-gather", ("expert",)] == (4, 2 * rows + 2 * choices)
    assert found["reduce-scatter", ("expert",)] == (3, 2 * rows + choices) and not any(kind == "all-to-all" for kind, _ in found)


def test_which_devices_hold_the_same_tokens() -> None:
    assert [dispatch.across(lay) for lay in LAYOUTS.values()] == [("expert",)] * 3
    assert [dispatch.aside(lay) for lay in LAYOUTS.values()] == [(), (), ("tensor",)]
    assert dispatch.across(ONE_DEVICE) == () == dispatch.aside(ONE_DEVICE)
