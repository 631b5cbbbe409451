"""A layer's mixture against the reference, its losses against their definitions, and what its fields refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.core.layout import ONE_DEVICE, Layout
from meshloom.core.spec import count, init
from meshloom.models.base import Ctx
from meshloom.models.mixture import Mixture, MixtureConfig, Told, extra, mixture, settle, summed, told
from meshloom.models.moe import Config
from meshloom.ops.moe import reference
from meshloom.ops.route import route

SIZES = dict(layers=2, embed=8, heads=2, ffn=12, vocab=16, experts=4, top=2, expert_ffn=6)


def case(**more):
    c = Config(**{**SIZES, **more})
    w = jax.tree.map(lambda a: a + 0.3 * jax.random.normal(jax.random.key(a.size), a.shape), init(Mixture.specs(c), jax.random.key(0)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8, 8)), jnp.float32)
    segments = jnp.asarray(np.where(np.arange(8) < 6, 1, 0)[None] * np.ones((3, 1)), jnp.int32)
    return c, w, x, Ctx(segments, None, None, jnp.arange(3), None, 0, None, None)


def plain(c, w, x, ctx):
    """The mixture by the reference: dropless."""
    flat, valid = x.reshape(-1, 8), ctx.segments.reshape(-1) > 0
    choice = route(c.router, flat @ w.router, w.bias, valid)
    y = reference(flat, choice.expert, choice.weight, w.gate, w.up, w.down)
    if w.dense is not None:
        dense = (jax.nn.silu(flat @ w.dense.gate) * (flat @ w.dense.up)) @ w.dense.down
        share = jax.nn.softmax(flat @ w.mix) if w.mix is not None else jnp.ones((len(flat), 2))
        y = y * share[:, :1] + dense * share[:, 1:]
    return y.reshape(x.shape)


@pytest.mark.parametrize(
    "more", [{}, dict(shared=2), dict(residual=True), dict(score="sigmoid", bias=True, groups=2, top_groups=1)], ids=str
)
def test_equals_the_reference_with_all_gradients(more) -> None:
    c, w, x, ctx = case(**more)
    loss = lambda fn: jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(fn(c, w, x, ctx))), (0, 1)))
    got = loss(lambda c, w, x, ctx: mixture(c, ONE_DEVICE, w, x, ctx)[0])(w, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(loss(plain)(w, x))):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=2e-5)


def test_padding_is_neither_routed_nor_counted() -> None:
    c, w, x, ctx = case()
    y, said = mixture(c, ONE_DEVICE, w, x, ctx)
    assert not y[:, 6:].any() and said.counts[:4].sum() == 3 * 6 * 2
    np.testing.assert_allclose(said.parts[:4].sum(), 18, rtol=1e-5)
    other, again = mixture(c, ONE_DEVICE, w, x.at[:, 6:].set(7.0), ctx)
    np.testing.assert_array_equal(other, y)
    np.testing.assert_array_equal(again.parts, said.parts)


def test_what_is_dropped_is_counted_and_adds_nothing() -> None:
    c, w, x, ctx = case(capacity=0.5)
    y, said = mixture(c, ONE_DEVICE, w, x, ctx)
    each = [mixture(c, ONE_DEVICE, w, x[i : i + 1], dataclasses.replace(ctx, segments=ctx.segments[i : i + 1])) for i in range(3)]
    np.testing.assert_allclose(y, jnp.concatenate([e[0] for e in each]), rtol=1e-5, atol=1e-6)
    assert said.counts[4] == sum(e[1].counts[4] for e in each) > 0
    late = mixture(c.model_copy(update={"capacity": 100.0}), ONE_DEVICE, w, x, ctx)
    assert late[1].counts[4] == 0
    np.testing.assert_allclose(late[0], plain(c, w, x, ctx), rtol=5e-5, atol=2e-5)


def test_losses_by_their_definition() -> None:
    rng = np.random.default_rng(0)
    counts, parts = rng.integers(1, 9, (2, 5)).astype(np.float32), rng.random((2, 6)).astype(np.float32)
    c = Config(**SIZES, balance_loss=0.5, router_z_loss=0.25)
    total, sums = extra(c, ONE_DEVICE, Told(jnp.asarray(counts), jnp.asarray(parts)))
    balance = sum(4 * (counts[l, :4] / counts[l, :4].sum() * parts[l, :4]).sum() for l in range(2))
    np.testing.assert_allclose(total, 0.5 * balance + 0.25 * parts[:, 4].sum(), rtol=1e-5)
    by_sequence = extra(c.model_copy(update={"balance": "sequence"}), ONE_DEVICE, Told(jnp.asarray(counts), jnp.asarray(parts)))
    np.testing.assert_allclose(by_sequence[1]["balance"], parts[:, 5].sum(), rtol=1e-6)
    assert told(c) == (5, 6, 0, 2) and sums["load"].shape == (2, 5)


def test_the_loss_of_each_sequence_does_not_know_the_others() -> None:
    c, w, x, ctx = case(balance="sequence", balance_loss=0.1)
    whole = mixture(c, ONE_DEVICE, w, x, ctx)[1].parts[-1]
    each = [
        mixture(c, ONE_DEVICE, w, x[i : i + 1], dataclasses.replace(ctx, segments=ctx.segments[i : i + 1]))[1].parts[-1] for i in range(3)
    ]
    np.testing.assert_allclose(whole, sum(each), rtol=1e-6)
    assert whole != 0


def test_the_biases_settle() -> None:
    c = Config(**SIZES, bias=True, bias_rate=0.5)
    got = settle(c, jnp.zeros((1, 4)), jnp.asarray([[4.0, 0, 0, 0, 99]]))
    np.testing.assert_array_equal(got, [[-0.5, 0.5, 0.5, 0.5]])


def test_parameters_of_pr_moe_by_hand() -> None:
    c = Config(**SIZES, residual=True)
    assert count(Mixture.specs(c)) == 8 * 4 + 4 * 3 * 8 * 6 + 3 * 8 * 12 + 8 * 2


@pytest.mark.parametrize(
    "more, lay, message",
    [
        (
            dict(capacity=1.0),
            Layout({"context": 2}, acts={"whole_seq": ("context",)}),
            r"the layout splits them over context. Set model.capacity: null",
        ),
        (
            {},
            Layout({"cube_embed": 2}, live={"embed": ("cube_embed",)}),
            "a cube of devices .* a router needs whole tokens. Use tensor",
        ),
        ({}, Layout({"rows": 2, "cols": 2}, options={"tensor2d": ("stream",)}), "Streamed products .* have no form for the 4 experts"),
    ],
)
def test_layouts_without_a_form_for_experts_are_refused(more, lay, message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**SIZES, **more).check_layout(lay)


def test_results_are_parts_of_a_sum() -> None:
    assert summed(Layout(acts={"expert_ffn": ("tensor",)})) == ("tensor",)


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(top=5), "A token cannot go to 5 of 4 experts. Lower top, or raise experts."),
        (dict(groups=3), "4 experts cannot lie in 3 equal groups. Use groups that divides 4."),
        (dict(groups=2, top_groups=3), "A token cannot use 3 of 2 groups. Lower top_groups"),
        (dict(groups=4, top_groups=1), "1 groups of 1 experts do not hold the 2 of a token. Raise top_groups, or lower top."),
        (dict(moe_layers=(True, False, True)), "moe_layers has 3 entries for 2 layers. Give one for each, or none."),
        (dict(bias_rate=0.1), "bias_rate 0.1 moves a bias that the routers do not have. Set bias: true"),
        (dict(shared=1, residual=True), "shared experts and residual both put a dense MLP beside the experts. Choose one."),
    ],
)
def test_refuses(more, message) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureConfig(**{**SIZES, **more})


def test_an_expert_is_as_wide_as_the_mlp_unless_told_otherwise() -> None:
    assert MixtureConfig(layers=1, embed=8, heads=2, vocab=16, experts=2, top=1).expert_ffn == 32
