"""Steps of models of other libraries under layouts against plain `jax.jit`: losses and parameters after several steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshloom as ml

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 8)).astype(np.float32), RNG.normal(size=(16, 4)).astype(np.float32)
LAYOUTS = ("data=8", "zero1=8", "zero2=4 tensor=2", "zero1=2 zero3=4", "tensor2d=2x2", "zero3=4 tensor=2", "data=2 zero3=2 tensor=2")


def plain():
    """A function and a dictionary."""
    params = {"up": {"w": RNG.normal(size=(8, 32)), "b": np.zeros(32)}, "down": {"w": RNG.normal(size=(32, 4))}, "seen": np.int32(3)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if np.ndim(x) else jnp.int32), params)

    def apply(p, x):
        return jax.nn.relu(x @ p["up"]["w"] + p["up"]["b"]) @ p["down"]["w"] * (p["seen"] / 3)

    return params, apply, {"up/w": "embed ffn", "down/w": "ffn _", "up/b": "ffn"}


def linen():
    """flax.linen: variables in a dictionary."""
    nn = pytest.importorskip("flax.linen")
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)])
    return (
        model.init(jax.random.key(0), X),
        model.apply,
        {"*/layers_0/kernel": "embed ffn", "*/layers_2/kernel": "ffn _", "*/layers_0/bias": "ffn"},
    )


def nnx():
    """flax.nnx: the state of a module."""
    try:
        from flax import nnx
    except (ImportError, AttributeError) as reason:  # Flax 0.12.8 does not know JAX 0.12
        pytest.skip(f"flax.nnx: {reason}")

    class Net(nnx.Module):
        def __init__(self, rngs) -> None:
            self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return state, lambda p, x: nnx.merge(graph, p)(x), {"up/kernel": "embed ffn", "down/kernel": "ffn _", "up/bias": "ffn"}


def equinox():
    """Equinox: a module with functions among its leaves, weights as [out, in]."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 4, 32, depth=1, key=jax.random.key(0))
    return model, lambda m, x: jax.vmap(m)(x), {"layers/0/weight": "ffn embed", "layers/1/weight": "_ ffn", "layers/0/bias": "ffn"}


def losses_and_params(step: ml.make_step, steps: int = 4) -> tuple[list[float], list[np.ndarray]]:
    """What a few steps give."""
    state, losses = step.start(), []
    for _ in range(steps):
        state, loss = step(state, (X, Y))
        losses.append(float(loss))
    return losses, [np.asarray(x) for x in jax.tree.leaves(state.params) if hasattr(x, "dtype")]


def by_hand(params, loss, optimizer, steps: int = 4) -> tuple[list[float], list[np.ndarray]]:
    """The same under plain jit, from optax's own functions."""
    arrays = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    moving = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def whole(mine):
        new = iter([mine[moving.index(i)] if i in moving else x for i, x in enumerate(arrays)])
        return jax.tree.map(lambda x: next(new) if hasattr(x, "dtype") else x, params)

    mine, losses = [arrays[i] for i in moving], []
    opt = optimizer.init(mine)

    @jax.jit
    def step(mine, opt):
        value, grads = jax.value_and_grad(lambda m: loss(whole(m), (X, Y)))(mine)
        updates, opt = optimizer.update(grads, opt, mine)
        return optax.apply_updates(mine, updates), opt, value

    for _ in range(steps):
        mine, opt, value = step(mine, opt)
        losses.append(float(value))
    return losses, [np.asarray(x) for x in jax.tree.leaves(whole(mine)) if hasattr(x, "dtype")]


@pytest.mark.parametrize("library", [plain, linen, nnx, equinox])
def test_equals_plain_jit_under_every_layout(library) -> None:
    params, apply, rules = library()
    loss = lambda p, batch: jnp.mean((apply(p, batch[0]) - batch[1]) ** 2)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    want, after = by_hand(params, loss, optimizer)
    for layout in LAYOUTS if library is plain else LAYOUTS[-2:]:
        losses, got = losses_and_params(ml.make_step(loss, optimizer, ml.shard(params, rules, layout)))
        np.testing.assert_allclose(losses, want, rtol=1e-5, err_msg=layout)
        for a, b in zip(got, after, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=layout)


def quadratic(layout: str, **more) -> ml.make_step:
    """The step of the plain model."""
    params, apply, rules = plain()
    loss = lambda p, batch: jnp.mean((apply(p, batch[0]) - batch[1]) ** 2)
    return ml.make_step(loss, optax.adam(1e-2), ml.shard(params, rules, layout, **more))


def test_the_optimizer_lies_with_its_parameters_and_stays_there() -> None:
    step = quadratic("zero3=4 tensor=2")
    state = step.start()
    for _ in range(2):
        moments = state.opt[0].mu["up"]["w"]
        assert moments.sharding.shard_shape(moments.shape) == (2, 16) and state.opt[0].count.sharding.is_fully_replicated
        assert state.params["up"]["w"].sharding.shard_shape((8, 32)) == (2, 16) and int(state.params["seen"]) == 3
        state, _ = step(state, (X, Y))


def test_the_start_keeps_the_parameters_that_were_given() -> None:
    step = quadratic("data=8")
    step(step.start(), (X, Y))
    assert np.isfinite(step.sharded.params["up"]["w"]).all()


def test_what_a_step_moves_is_counted_in_the_compiled_program() -> None:
    """Under `data` every gradient is all-reduced over the batch's mesh axis (XLA may sum several at once) and so is the loss: at least
    8*32 + 32 + 32*4 + 1 numbers. Under `zero3` weights are gathered too."""
    step = quadratic("data=8")
    moved = step.moves(step.start(), (X, Y))
    assert set(moved) == {("all-reduce", ("data",))} and moved["all-reduce", ("data",)][1] >= 4 * (8 * 32 + 32 + 32 * 4 + 1)
    zero = quadratic("zero3=8")
    assert ("all-gather", ("zero3",)) in zero.moves(zero.start(), (X, Y))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    step = quadratic("data=8")
    with pytest.raises(
        ValueError, match="A batch with 12 along 'batch' cannot be split over 8 devices .data.. Use a multiple of 8: 16, say"
    ):
        step(step.start(), (X[:12], Y[:12]))
