"""Attention in a ring against the reference on one device: values, gradients, traffic, and memory that does not grow with the square of the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.order import places, true_place
from meshloom.core.spec import abstract
from meshloom.objectives.lm import lm
from meshloom.ops import ring as ring_module
from meshloom.ops.attention import attention
from meshloom.ops.dropout import AttentionDropout
from meshloom.ops.ring import ring_attention, runs, steps
from meshloom.parallel.context import CONTEXT
from meshloom.parallel.table import build
from meshloom.plan.hlo import collectives, total
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.gradient import batch_shardings, make_gradient
from programs import QUICK, config, rows

SIZE, B = 8, 2


def inputs(length, h, g, dtype=np.float32):
    rng = np.random.default_rng(length + h)
    arrays = [rng.standard_normal((B, length, n, SIZE)).astype(dtype) for n in (h, g, g, h)]
    documents = np.sort(rng.integers(0, 5, (B, length)))[:, ::-1].astype(np.int32)  # 0, padding, stands last
    return arrays, documents


def program(ring, length, h, g, window=None, packed=False, block=None, drop=None, dtype=np.float32):
    """(compiled, inputs in the devices' order): result, dq, dk, dv of a ring over the first devices."""
    lay = CONTEXT.layout(ring)
    order = true_place(lay, np.arange(length), length)
    arrays, documents = inputs(length, h, g, dtype)

    def local(q, k, v, documents):
        dropout = drop and drop._replace(queries=places(lay, "attend_seq", q.shape[1]))
        segments = documents if packed else None
        return ring_attention(
            q, k, v, axes=("context",), ring=ring, scale=0.3, window=window, segments=segments, dropout=dropout, block=block
        )

    split = P(None, "context")
    mapped = jax.shard_map(local, mesh=make_mesh(lay), in_specs=(split, split, split, P()), out_specs=split)

    def run(q, k, v, w, documents):
        y, back = jax.vjp(lambda *a: mapped(*a, documents), q, k, v)
        return (y, *back(w))

    args = *(a[:, order] for a in arrays), documents[:, order]
    return jax.jit(run).lower(*args).compile(compiler_options=QUICK), args, np.argsort(order)


def reference(length, h, g, window=None, packed=False, drop=None, dtype=np.float32):
    arrays, documents = inputs(length, h, g, dtype)
    q, k, v, w = (jnp.asarray(a, jnp.float32) for a in arrays)
    segments = (documents, documents) if packed else None

    def run(q, k, v, w):
        y, back = jax.vjp(lambda *a: attention(*a, scale=0.3, window=window, segments=segments, dropout=drop), q, k, v)
        return (y, *back(w))

    return jax.jit(run)(q, k, v, w)


def apart(got, want, back):
    return max(float(np.abs(np.asarray(a, np.float32)[:, back] - b).max() / np.abs(b).max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "ring, length, h, g, window, packed, block",
    [
        (2, 16, 4, 2, None, False, None),
        (3, 36, 6, 2, None, True, 2),  # three devices, blocks smaller than a piece
        (4, 32, 4, 4, None, True, None),
        (4, 64, 6, 2, 5, True, 4),  # a window smaller than a piece
        (4, 64, 4, 1, 27, False, 8),  # larger than a device's share
        (8, 64, 4, 2, 7, True, 2),
        (8, 64, 4, 2, 1000, False, None),
    ],
)
def test_equals_one_device(ring, length, h, g, window, packed, block) -> None:
    compiled, args, back = program(ring, length, h, g, window, packed, block)
    assert apart(compiled(*args), reference(length, h, g, window, packed), back) < 2e-6


def test_a_query_that_sees_itself_alone() -> None:
    compiled, args, back = program(2, 16, 2, 2, window=1)
    got, want = compiled(*args), reference(16, 2, 2, window=1)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a)[:, back], b, atol=1e-6)


def test_dropout_is_that_of_one_device() -> None:
    drop = AttentionDropout(0.4, jax.random.key(3), np.arange(B), np.arange(4), np.arange(32), np.arange(32))
    compiled, args, back = program(4, 32, 4, 2, packed=True, block=2, drop=drop)
    want = reference(32, 4, 2, packed=True, drop=drop)
    assert apart(compiled(*args), want, back) < 2e-6
    assert apart(compiled(*args), reference(32, 4, 2, packed=True), back) > 0.1


def test_bfloat16_adds_up_in_fp32() -> None:
    compiled, args, back = program(4, 64, 4, 2, block=4, dtype=jnp.bfloat16)
    got = compiled(*args)
    assert all(a.dtype == jnp.bfloat16 for a in got) and apart(got, reference(64, 4, 2, dtype=jnp.bfloat16), back) < 2e-2


@pytest.mark.parametrize("ring, length, window", [(2, 16, None), (4, 32, None), (8, 64, 5), (8, 64, None)])
def test_moves_keys_and_values_once_around_each_way(ring, length, window) -> None:
    compiled, _, _ = program(ring, length, 4, 2, window)
    array, hops = B * length // ring * 2 * SIZE * 4, len(steps(ring, length // ring // 2, window))
    found = total(collectives(compiled.as_text(), {"context": ring}))
    assert found == {("collective-permute", ("context",)): (6 * hops, 6 * hops * array)}
    assert hops == (ring - 1 if window is None else 2)


def test_a_window_skips_steps_that_no_device_needs() -> None:
    assert steps(8, 4, None) == steps(8, 4, 1000) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(8, 4, 1) == [] and steps(8, 4, 2) == steps(8, 4, 5) == [1, 7] and steps(8, 4, 6) == [1, 2, 6, 7]
    assert runs(8, 4, None) == [(1, 7, 1)] and runs(8, 4, 6) == [(1, 2, 4), (6, 2, 1)]


@pytest.mark.parametrize("window", [2, 5, 6, 11, 30, 49])
def test_no_skipped_step_had_a_visible_key(window) -> None:
    ring, half = 4, 8
    at = true_place(CONTEXT.layout(ring), np.arange(2 * ring * half), 2 * ring * half).reshape(ring, -1)
    back = at[:, None, :, None] - at[None, :, None, :]
    seen = ((back >= 0) & (back < window)).any((2, 3))
    needed = {(r - s) % ring for r in range(ring) for s in range(ring) if seen[r, s] and r != s}
    assert needed == set(steps(ring, half, window))


def test_memory_of_a_model_has_no_masks_of_all_pairs(monkeypatch) -> None:
    """Blocks of 32 tokens, so that short rows have many. What does not depend on a layer's input may not leave the loop over layers."""
    monkeypatch.setattr(ring_module, "BLOCK", 32)
    temp = {seq: compiled_gradient(seq).memory_analysis().temp_size_in_bytes for seq in (1024, 2048)}
    assert temp[2048] < 2.3 * temp[1024]  # 3.4 times where masks leave the loop


def compiled_gradient(seq):
    """The gradient of a small model in a ring of four, compiled for abstract arrays."""
    model, c = config("llama", max_seq=seq)
    lay = build("context=4", c, seq)
    plan = Plan(make_mesh(lay), lay, How("scan", "full"), 1, "float32")
    place = lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)
    batch = jax.tree.map(place, rows(2, 1, seq=seq), batch_shardings(plan))
    params = abstract(model.specs(c), shardings(plan.mesh, lay, "rest", model.specs(c)))
    program = jax.jit(make_gradient(model, c, plan, lm()))
    return program.lower(params, batch, None, jax.ShapeDtypeStruct((), jnp.float32)).compile(compiler_options=QUICK)


def test_memory_grows_with_the_length_and_not_its_square() -> None:
    temp = {n: program(4, n, 2, 2, block=32)[0].memory_analysis().temp_size_in_bytes for n in (1024, 2048)}
    assert temp[2048] < 2.3 * temp[1024]
    assert temp[2048] < B * 2 * (2048 // 4) ** 2 * 4, "less than one device's matrix of scores"


def test_refuses_half_a_piece() -> None:
    with pytest.raises(ValueError, match="7 tokens on a device of a ring cannot be two pieces. Use a sequence that is a multiple of 8"):
        ring_attention(*[jnp.zeros((1, 7, 1, 8))] * 3, axes=("context",), ring=4, scale=1.0)
