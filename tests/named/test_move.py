"""Which collective each change of layout is, and that elements end where they should."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshloom as ml
from meshloom.core.mesh import make_mesh
from meshloom.named import move
from meshloom.named.rules import layout
from meshloom.plan.hlo import collectives, total

LAY = layout("a=2 b=2 c=2")
CASES = {
    # how a [8, 8] array is split, how it is wanted: kinds and mesh axes, each once
    "stays": (("a", "b"), ("a", "b"), {}),
    "split": (("", ""), ("a", "bc"), {}),
    "split more": (("a", ""), ("ab", ""), {}),
    "gathered": (("ab", ""), ("", ""), {"all-gather": "ab"}),
    "last gathered": (("ab", "c"), ("a", "c"), {"all-gather": "b"}),
    "moved": (("a", ""), ("", "a"), {"all-to-all": "a"}),
    "last moved": (("ab", ""), ("a", "b"), {"all-to-all": "b"}),
    "several moved": (("abc", ""), ("a", "bc"), {"all-to-all": "bc"}),
    "exchanged": (("a", "b"), ("b", "a"), {"all-gather": "a", "all-gather ": "b"}),
    "first given up": (("ab", ""), ("b", ""), {"all-gather": "ab"}),
    "taken over among others": (("a", ""), ("", "ab"), {"all-gather": "a"}),
}


@pytest.mark.parametrize("name", CASES)
def test_relayout(name: str) -> None:
    have, want, moves = CASES[name]
    have, want = [tuple(h) for h in have], [tuple(w) for w in want]
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh, where = make_mesh(LAY), [PartitionSpec(*(axes or None for axes in split)) for split in (have, want)]

    def fn(x):
        y, gathers, pending = move.relayout(LAY, x, have, want, frozenset())
        assert not pending
        return move.gathered(y, gathers, frozenset())

    run = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=where[0], out_specs=where[1]))
    x = jax.device_put(x, NamedSharding(mesh, where[0]))
    np.testing.assert_array_equal(run(x), x)
    found = total(collectives(run.lower(x).compile().as_text(), LAY.sizes))
    assert {key: n for key, (n, _) in found.items()} == {(kind.strip(), tuple(axes)): 1 for kind, axes in moves.items()}


def test_a_sum_still_owed_is_scattered_where_its_mesh_axis_comes_to_an_axis() -> None:
    mesh, x = make_mesh(LAY), np.arange(64, dtype=np.float32).reshape(8, 8)

    def fn(x):
        y, gathers, pending = move.relayout(LAY, x, [(), ()], [("a",), ()], frozenset("ab"))
        assert not gathers and pending == {"b"}
        return move.add_up(y, pending)

    run = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(None, ("a", "b")), out_specs=PartitionSpec("a")))
    np.testing.assert_array_equal(run(x), x.reshape(8, 4, 2).sum(1))
    found = total(collectives(run.lower(x).compile().as_text(), LAY.sizes))
    assert found == {("reduce-scatter", ("a",)): (1, 64), ("all-reduce", ("b",)): (1, 32)}


def test_one_mesh_axis_summed_and_one_split_along_the_same_axis() -> None:
    """Only one of the two mesh axes owes a sum, so the sum is done first and a part kept."""
    x = ml.tensor("k n", np.arange(32, dtype=np.float32).reshape(4, 8))
    told = ml.explain(lambda x: ml.rename(ml.sum(x, "k"), n="m"), x, mesh="a=2 b=2", rules="k:a m:a,b")
    assert told.total == {("all-reduce", ("a",)): (1, 32)}
