"""The letters of every primitive are true: cut operands along a letter, run both halves, and join or add the results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshloom.auto.choices import RULES, WHOLE, letters

a, b = (np.random.default_rng(i).normal(size=(4, 6, 8)).astype(np.float32) for i in (0, 1))
numbers = np.random.default_rng(2).integers(0, 6, (4, 2))
ROWS = lax.ScatterDimensionNumbers(update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
CASES = {
    # a function that works for halves of its operands too: what it is, operands
    "elementwise": (lambda x, y: x * y, a, b),
    "broadcast operand": (lambda x, y: lax.add_p.bind(x, y), a, b[:, :1]),
    "clamp": (lambda x: lax.clamp_p.bind(jnp.float32(-1), x, jnp.float32(1)), a),
    "select": (lambda c, x, y: lax.select_n_p.bind(c, x, y), a > 0, a, b),
    "sum": (lambda x: jnp.sum(x, 1), a),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), a),
    "cumsum": (lambda x: lax.cumsum(x, 1), a),
    "sort": (lambda x: lax.sort(x, dimension=1), a),
    "top_k": (lambda x: lax.top_k(x, 2), a),
    "reverse": (lambda x: lax.rev(x, (1,)), a),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), a, b),
    "slice": (lambda x: lax.slice_in_dim(x, 1, 3, axis=1), a),
    "pad": (lambda x: lax.pad(x, np.float32(0), [(0, 0, 0), (1, 1, 0), (0, 0, 0)]), a),
    "split": (lambda x: lax.split(x, (2, 4), axis=1), a),
    "dynamic slice": (lambda x: lax.dynamic_slice_in_dim(x, 1, 3, axis=1), a),
    "dynamic update": (lambda x, y: lax.dynamic_update_slice_in_dim(x, y, 2, axis=1), a, b[:, :1]),
    "batched product": (lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), a, np.swapaxes(b, 1, 2)),
    "product over two": (lambda x, y: lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ()))), a, b),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), a),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (3, *x.shape), (1, 2, 3)), a),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), a[:, :1]),
    "merge": (lambda x: lax.reshape(x, (x.shape[0], x.shape[1] * x.shape[2])), a),
    "divide": (lambda x: lax.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)), a),
    "one in front": (lambda x: lax.reshape(x, (1, *x.shape)), a),
    "stack": (lambda x, y: jnp.stack([x, y], 1), a, b),
    "tile": (lambda x: jnp.tile(x, (1, 2, 1)), a),
    "fft": (lambda x: lax.fft_p.bind(x, fft_type=jax.lax.FftType.FFT, fft_lengths=(8,)), a.astype(np.complex64)),
    "image": (lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"), a, b[:2, :, :3]),
    "rows": (lambda x, i: x[i, :], a[0], numbers),
    "rows of a batch": (lambda x, i: jax.vmap(lambda x, i: x[i])(x, i), a, numbers),
    "add to rows": (lambda x, i, y: lax.scatter_add(x, i, y, ROWS), 0 * a[0], numbers[..., None], b[:, :2]),
    "put in rows": (lambda x, i, y: jnp.asarray(x).at[i].set(y), a[0], np.arange(4), b[:, 0]),
}  # fmt: skip


def cut(x, axis, half):
    n = x.shape[axis] // 2
    return x[(slice(None),) * axis + (slice(half * n, half * n + n),)]


def find(closed):
    """The equation whose result is the function's."""
    jaxpr = closed.jaxpr
    eqns = [e for e in jaxpr.eqns if e.outvars and e.outvars[0] in jaxpr.outvars]
    return eqns[-1]


@pytest.mark.parametrize("name", CASES)
def test_letters_are_true(name: str) -> None:
    fn, *operands = CASES[name]
    inlined = jax.make_jaxpr(fn)(*operands)
    while any(e.primitive.name == "jit" for e in inlined.jaxpr.eqns) and len(inlined.jaxpr.eqns) == 1:
        inlined = inlined.jaxpr.eqns[0].params["jaxpr"]
    eqn = find(inlined)
    rule, known = letters(eqn)
    assert known, eqn.primitive.name
    place = {v: i for i, v in enumerate(inlined.jaxpr.invars)}
    own = {i: rule.ins[k] for k, v in enumerate(eqn.invars) if not hasattr(v, "val") and (i := place.get(v)) is not None}
    direct = [i for i in range(len(operands)) if i in own]
    whole = jax.tree.leaves(fn(*operands))
    tried = 0
    for letter, size in enumerate(rule.sizes):
        axes = {i: own[i].index(letter) for i in direct if letter in own[i]}
        if size % 2 or not axes:
            continue
        if len(axes) < sum(letter in ins for ins in rule.ins) or (not any(letter in o for o in rule.outs) and letter not in rule.summed):
            continue  # an operand with this letter is computed inside; a letter of which nothing is said
        if name in ("rows", "rows of a batch", "add to rows", "put in rows") and 0 in axes and own[0].index(letter) in looked(eqn):
            continue  # the looked-up axis: each device masks what it lacks, which the test of the compiled program shows
        parts = [jax.tree.leaves(fn(*(cut(x, axes[i], h) if i in axes else x for i, x in enumerate(operands)))) for h in (0, 1)]
        for w, x, y, outs in zip(whole, *parts, rule.outs):
            joined = x + y if letter in rule.summed else np.concatenate([x, y], outs.index(letter))
            np.testing.assert_allclose(joined, w, rtol=2e-5, atol=1e-5)
        tried += 1
    assert tried, f"no letter of {eqn.primitive.name} was tried: {rule}"


def looked(eqn) -> tuple[int, ...]:
    n = eqn.params["dimension_numbers"]
    return tuple(getattr(n, "collapsed_slice_dims", ())) + tuple(getattr(n, "inserted_window_dims", ()))


def test_what_has_no_row_is_whole() -> None:
    eqn = next(e for e in jax.make_jaxpr(lax.linalg.cholesky)(np.eye(4, dtype=np.float32)).jaxpr.eqns if e.primitive.name not in RULES)
    rule, known = letters(eqn)
    assert not known and set(rule.ins[0]) == {WHOLE} and rule.heavy


def test_ragged_products_split_features() -> None:
    rows, groups = np.ones((8, 4), np.float32), np.array([3, 5], np.int32)
    eqn = jax.make_jaxpr(lax.ragged_dot)(rows, np.ones((2, 4, 6), np.float32), groups).jaxpr.eqns[-1]
    eqn = eqn if eqn.primitive.name == "ragged_dot_general" else eqn.params["jaxpr"].jaxpr.eqns[-1]
    rule, known = letters(eqn)
    assert known and rule.ins == ((WHOLE, 0), (WHOLE, 0, 1), (WHOLE,)) and rule.outs == ((WHOLE, 1),) and rule.summed == (0,)
    assert rule.flops == 2 * 8 * 4 * 6
