"""A function cut into layers computes what it did, with the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.plan.cut import cut, joined, whole

WIDTH, DEPTH = 8, 5


def model(w, data):
    """Tokens through an embedding, layers with a skip from the first to the last, and the embedding again as the head; a jit and a remat inside."""
    mask = jnp.tril(jnp.ones((6, 6)))
    x = w["embed"][data["tokens"]]
    first = x
    for one in w["layers"]:
        x = x + jax.jit(lambda x, a: jax.nn.gelu(mask @ x @ a))(x, one["a"]) @ one["b"].astype(jnp.float32)
        x = jax.checkpoint(jnp.tanh)(x)
    logits = (x + first) @ w["embed"].T
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(data["targets"], 11)).sum()


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    of = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)
    layers = [{"a": of(WIDTH, WIDTH), "b": of(WIDTH, WIDTH).astype(jnp.bfloat16)} for _ in range(DEPTH)]
    tokens = rng.integers(0, 11, (2, 4, 6)).astype(np.int32)
    return {"embed": of(11, WIDTH), "layers": layers}, {"tokens": tokens[0], "targets": tokens[1]}


@pytest.mark.parametrize("count", [1, 3, 7])
def test_layers_are_the_function(case, count: int) -> None:
    params, data = case
    layers = cut(model, params, data, count, epsilon=2.0)
    assert len(layers) == count
    want, slopes = jax.jit(jax.value_and_grad(model))(params, data)
    got, found = jax.jit(jax.value_and_grad(whole(layers)))([layer.params for layer in layers], data)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    total = {}
    for grads in found:
        for name, g in grads.items():
            total[name] = total.get(name, 0) + g
    want = {"embed": slopes["embed"], **{f"layers.{i}.{k}": one[k] for i, one in enumerate(slopes["layers"]) for k in one}}
    assert set(total) == set(want)
    for name, g in want.items():
        np.testing.assert_allclose(np.float32(total[name]), np.float32(g), atol=1e-5, rtol=1e-2 if name.endswith("b") else 1e-5)
    if count > 1:
        assert all(layer.tied == (("embed",) if "embed" in layer.params else ()) for layer in layers)
        assert layers[0].takes == ("tokens",) and sum("targets" in layer.takes for layer in layers) == 1, "each takes what it reads"


def test_layers_joined_are_a_stage(case) -> None:
    params, data = case
    layers = cut(model, params, data, 4, epsilon=2.0)
    message = ()
    for first, last in ((0, 1), (1, 4)):
        stage, held = joined(layers[first:last], first)
        assert ("embed" in held) and set(held) == {"embed", *(f"layer {i}" for i in range(first, last))}
        message = stage.run(held, message, {name: data[name] for name in stage.takes})
    assert float(message) == pytest.approx(float(model(params, data)), rel=1e-6)


def test_refuses_what_is_no_loss(case) -> None:
    params, data = case
    with pytest.raises(ValueError, match=r"The function returns float32\[4,6,8\]. Let it return the loss"):
        cut(lambda w, data: w["embed"][data["tokens"]] * w["embed"][0], params, data, 1)
