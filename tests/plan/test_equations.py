"""Operations and crossing bytes of any function, beside the compiler's count and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.plan.equations import count, program, traced

A, B, X = jnp.ones((8, 16)), jnp.ones((16, 4)), jnp.ones((32, 8))
IMAGE, KERNEL = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))


def conv(x, k):
    return jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


CASES = {
    "products": (lambda x, a, b: x @ a @ b, (X, A, B)),
    "a jit inside": (lambda x, a: jax.jit(lambda x: x @ a)(x) + 1, (X, A)),
    "remat": (lambda x, a, b: jax.checkpoint(lambda x: x @ a)(x) @ b, (X, A, B)),
    "a convolution": (conv, (IMAGE, KERNEL)),
    "a batched product": (lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), (jnp.ones((2, 8, 4, 6)), jnp.ones((2, 8, 4, 6)))),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_what_the_compiler_counts(name: str) -> None:
    fn, args = CASES[name]
    want = jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]
    assert count(traced(fn, *args)).flops.sum() == pytest.approx(want, rel=0.02)


def test_loops_and_branches_by_hand() -> None:
    turns = lambda x, a: jax.lax.scan(lambda x, _: (x @ a @ a.T, None), x, None, length=7)[0]
    each = 2 * 2 * 32 * 8 * 16
    assert count(traced(turns, X, A)).flops.sum() == 7 * each
    branch = lambda x, a: jax.lax.cond(x[0, 0] > 0, lambda: x @ a @ a.T, lambda: x)
    assert count(traced(branch, X, A)).flops.max() == each
    loop = count(traced(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x), X))
    assert loop.once == 1 and "while loops counted as one turn: 1" in loop.said


def test_what_counts_as_no_work_is_named() -> None:
    found = count(traced(lambda x: jnp.fft.fft(x).real.T.reshape(-1), X))
    assert found.zero["fft"] == 1 and "fft (1)" in found.said and "transpose" in found.said
    assert not count(traced(lambda x, a: x @ a, X, A)).said


def mlp(w, data):
    """Two layers; the mask needs no parameter, the cast no data."""
    mask = jnp.where(jnp.arange(8) < 6, 1.0, 0.0)
    h = (data["x"] * mask) @ w["in"].astype(jnp.float32)
    h = jax.nn.relu(h)
    return (h @ w["out"]).sum()


def test_a_chain_is_what_depends_on_both() -> None:
    w = {"in": A.astype(jnp.bfloat16), "out": B}
    p = program(mlp, w, {"x": X})
    names = [p.closed.jaxpr.eqns[at].primitive.name for at in p.chain]
    assert names == ["dot_general", "custom_jvp_call", "dot_general", "reduce_sum"]
    assert list(p.front) == [0, 32 * 16 * 4, 32 * 16 * 4, 32 * 4 * 4], "what the layer before made"
    assert p.flops[0] >= 2 * 32 * 8 * 16 + 32 * 8, "the mask's product is the first operator's"
    assert p.flops[2] == 2 * 32 * 16 * 4 and set(p.params) == {"in", "out"}
    assert p.flops.sum() == p.counted.flops.sum()


def test_a_value_that_skips_a_layer_passes_in_front_of_it() -> None:
    def skip(w, data):
        a = data["x"] @ w["a"]  # [32, 16]
        b = a @ w["b"]  # [32, 4]
        c = b @ w["c"]  # [32, 16]
        return (a + c).sum()

    p = program(skip, {"a": A, "b": B, "c": jnp.ones((4, 16))}, {"x": X})
    wide, narrow = 32 * 16 * 4, 32 * 4 * 4
    assert list(p.front) == [0, wide, wide + narrow, 2 * wide, wide]


def test_refuses_what_uses_no_parameters() -> None:
    with pytest.raises(ValueError, match="nothing that the function computes depends on both"):
        program(lambda w, data: data["x"].sum(), {"a": np.ones(3)}, {"x": X})
