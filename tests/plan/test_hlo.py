"""Programs whose collectives are known, and texts of the forms that a CPU does not compile to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshloom.plan.hlo import axis_groups, collectives, nbytes, replica_groups, total
from programs import compiled

SIZES = {"a": 2, "b": 4}
P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


CASES = {
    # name: (function of a local [4, 8] fp32 shard, what out varies over, {(kind, axes): (count, bytes)}); 128 bytes a shard
    "sum": (lambda x: lax.psum(x, "b"), P("a"), {("all-reduce", ("b",)): (1, 128)}),
    "sum over both": (lambda x: lax.psum(x, ("a", "b")), P(), {("all-reduce", ("a", "b")): (1, 128)}),
    "two at once": (lambda x: sum(lax.psum((x, x[:2].sum()), "a")), P(None, "b"), {("all-reduce", ("a",)): (2, 132)}),
    "gather": (lambda x: lax.all_gather(x, "b", axis=0, tiled=True), P(("a", "b")), {("all-gather", ("b",)): (1, 512)}),
    "scatter": (lambda x: lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True), P(("a", "b")), {("reduce-scatter", ("b",)): (1, 128)}),
    "exchange": (lambda x: lax.all_to_all(x, "b", 0, 0, tiled=True), P(("a", "b")), {("all-to-all", ("b",)): (1, 128)}),
    "shift": (
        lambda x: lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)]),
        P(("a", "b")),
        {("collective-permute", ("b",)): (1, 128)},
    ),
    "half stay": (
        lambda x: lax.ppermute(x, "b", [(0, 0), (1, 2), (2, 1), (3, 3)]),
        P(("a", "b")),
        {("collective-permute", ("b",)): (1, 64)},
    ),
    "shift along both": (
        lambda x: lax.ppermute(x, ("a", "b"), [(i, (i + 1) % 8) for i in range(8)]),
        P(("a", "b")),
        {("collective-permute", ("a", "b")): (1, 128)},
    ),
    "none": (lambda x: x * 2, P(("a", "b")), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_each_kind(mesh, name) -> None:
    fn, out, want = CASES[name]
    text = compiled(fn, mesh, P(("a", "b")), out, (32, 8))
    assert total(collectives(text, SIZES)) == want


def _loops(depths):
    """A sum inside loops of these lengths, one in another, that depends on each step."""

    def fn(x):
        def nest(x, left):
            if not left:
                return x + lax.psum(jnp.sin(x), "a") * 0.1
            return lax.scan(lambda c, i: (nest(c * (i + 1.0), left[1:]), None), x, jnp.arange(left[0], dtype=jnp.float32))[0]

        return nest(x, depths)

    return fn


@pytest.mark.parametrize("depths", [(3,), (5, 2), (2, 3, 4)])
def test_multiplies_nested_loops(mesh, depths) -> None:
    text = compiled(_loops(depths), mesh, P(("a", "b")), P(("a", "b")), (32, 8))
    times = int(np.prod(depths))
    assert total(collectives(text, SIZES)) == {("all-reduce", ("a",)): (times, times * 128)}


def test_refuses_a_loop_of_unknown_length(mesh) -> None:
    def fn(x):
        return lax.while_loop(lambda c: c.sum() < 1e9, lambda c: c + lax.psum(jnp.exp(c), ("a", "b")), lax.psum(x, ("a", "b")))

    text = compiled(fn, mesh, P(("a", "b")), P(), (32, 8))
    with pytest.raises(ValueError, match=r"no known trip count. Use lax.scan"):
        collectives(text, SIZES)


TEXT = """
HloModule m, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %all-gather-start.1 = (bf16[8,16]{1,0}, bf16[32,16]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true
  %all-gather-done.1 = bf16[32,16]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %t = (s32[], bf16[8,16]{1,0}) tuple(%i, %y)
}

%wrapped (p: f32[8,4]) -> f32[4,4] {
  ROOT %rs = f32[4,4]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true, to_apply=%add
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %while.1 = (s32[], bf16[8,16]{1,0}) while(%t0), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %all-reduce-start.2 = (f32[4,4]{1,0:T(8,128)}, /*index=1*/bf16[10]{0}) all-reduce-start(%a, %b), channel_id=2, replica_groups={}, to_apply=%add, metadata={op_name="jit(f)/psum"}
  %all-reduce-done.2 = (f32[4,4]{1,0}, bf16[10]{0}) all-reduce-done(%all-reduce-start.2)
  %rs-start = ((f32[8,4]{1,0}), f32[4,4]{1,0}) async-start(%q), calls=%wrapped
  %rs-done = f32[4,4]{1,0} async-done(%rs-start)
  %collective-permute-start = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%c), source_target_pairs={{0,4},{1,5},{2,6},{3,7}}
  ROOT %out = (f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}) all-to-all(%1, %2, %3, %4), replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""


def test_reads_asynchronous_and_variadic_forms() -> None:
    assert total(collectives(TEXT, SIZES)) == {
        ("all-gather", ("b",)): (6, 6 * 32 * 16 * 2),
        ("all-reduce", ("a", "b")): (2, 64 + 20),
        ("reduce-scatter", ("a",)): (1, 2 * 64),
        ("collective-permute", ("a",)): (1, 24),
        ("all-to-all", ("b",)): (1, 32),
    }


CONDITION = """
%fused (p.1: s32[], p.2: s32[]) -> pred[] {
  ROOT %lt = pred[] compare(%p.1, %p.2), direction=LT
}

%cond (p: (s32[], bf16[8,16])) -> pred[] {
  %c = s32[]{:T(128)} constant(6), metadata={op_name="while/cond/lt"}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %f = pred[] fusion(%i, %c), kind=kLoop, calls=%fused
}

ENTRY"""


def test_a_loops_length_is_read_from_its_condition_where_nothing_says_it() -> None:
    """As a TPU's compiler writes loops."""
    said = ', backend_config={"known_trip_count":{"n":"6"}}'
    silent = TEXT.replace(said, "").replace("\nENTRY", CONDITION)
    assert said in TEXT and total(collectives(silent, SIZES)) == total(collectives(TEXT, SIZES))
    with pytest.raises(ValueError, match="no known trip count"):
        collectives(silent.replace("direction=LT", "direction=NE"), SIZES)


def test_keeps_the_name_of_the_place() -> None:
    assert [f.name for f in collectives(TEXT, SIZES) if f.kind == "all-reduce"] == ["jit(f)/psum"]


def test_refuses_groups_that_are_no_mesh_axes() -> None:
    with pytest.raises(ValueError, match="not the devices along any axes of the mesh"):
        collectives(TEXT.replace("{{0,1,2,3},{4,5,6,7}}", "{{0,2},{1,3},{4,6},{5,7}}"), SIZES)


def test_refuses_traffic_on_a_condition() -> None:
    text = TEXT.replace("while(%t0), condition=%cond, body=%body", "conditional(%p, %t0, %t1), branch_computations={%body, %wrapped}")
    with pytest.raises(ValueError, match="moves bytes on a condition"):
        collectives(text, SIZES)


def test_refuses_text_that_is_no_program() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives("hello", SIZES)


@pytest.mark.parametrize(
    "type, size", [("f32[3,64]{1,0}", 768), ("bf16[]", 2), ("pred[7]{0}", 7), ("s32[<=4]{0}", 16), ("f8e4m3fn[5]{0}", 5), ("s4[3]{0}", 2)]
)
def test_bytes_of_a_type(type, size) -> None:
    assert nbytes(type) == size


def test_groups_of_every_spelling() -> None:
    pairs = frozenset({frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6}), frozenset({3, 7})})
    assert replica_groups("replica_groups=[4,2]<=[2,4]T(1,0)", 8) == replica_groups("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 8) == pairs
    assert replica_groups("channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", 8) == pairs  # JAX 0.12 names the mesh
    assert axis_groups(SIZES)[pairs] == ("a",)
    assert replica_groups("replica_groups={}", 2) == frozenset({frozenset({0, 1})})
