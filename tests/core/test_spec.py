"""Specs: shapes from names, starting values that depend on path and layer alone."""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.spec import ONES, ROLES, Init, abstract, count, init, is_spec, spec, stack, trained, with_frozen

SIZES = {"embed": 8, "ffn": 12, "vocab": 16}
SPECS = {
    "up": stack(spec(SIZES, "embed ffn", Init(0.02)), 3),
    "norm": spec(SIZES, "embed", ONES),
    "table": spec(SIZES, "vocab embed", Init(0.5), used={"vocab": 11}),
}


def test_shapes_and_counts() -> None:
    assert SPECS["up"].shape == (3, 8, 12) and SPECS["up"].axes == ("layer", "embed", "ffn")
    assert SPECS["table"].used == (11, 8) and SPECS["table"].nbytes == 16 * 8 * 4
    assert count(SPECS) == 3 * 96 + 8 + 88
    assert all(is_spec(s) for s in jax.tree.leaves(SPECS, is_leaf=is_spec)) and jax.tree.leaves(SPECS) == list(
        SPECS[k] for k in sorted(SPECS)
    )


def test_a_stack_keeps_what_a_parameter_does() -> None:
    one = replace(spec(SIZES, "embed"), role="added")
    assert stack(one, 3).role == "added" and spec(SIZES, "embed").role in ROLES and stack(one, 3).used == (3, 8)


def test_abstract_makes_no_array() -> None:
    before = len(jax.live_arrays())
    shapes = abstract(SPECS)
    assert shapes["up"].shape == (3, 8, 12) and len(jax.live_arrays()) == before


def test_start_depends_on_path_and_layer_alone() -> None:
    one = init(SPECS, jax.random.key(0))
    more = init({**SPECS, "up": stack(spec(SIZES, "embed ffn", Init(0.02)), 5), "other": SPECS["norm"]}, jax.random.key(0))
    np.testing.assert_array_equal(one["up"], more["up"][:3])
    np.testing.assert_array_equal(one["table"], more["table"])
    twin = init({"a": SPECS["table"], "b": SPECS["table"]}, jax.random.key(0))
    assert not np.array_equal(twin["a"], twin["b"]), "two parameters of one shape start apart"
    assert not np.array_equal(one["up"][0], one["up"][1]) and not np.array_equal(one["up"], init(SPECS, jax.random.key(1))["up"])


def test_start_is_bit_equal_in_every_layout() -> None:
    one = init(SPECS, jax.random.key(0))
    split = Layout({"zero": 4, "tensor": 2}, rest={"embed": ("zero",), "ffn": ("tensor",), "vocab": ("tensor",)})
    got = init(SPECS, jax.random.key(0), shardings(make_mesh(split), split, "rest", SPECS))
    assert got["up"].sharding.spec == P(None, ("zero",), ("tensor",))
    for name in SPECS:
        np.testing.assert_array_equal(one[name], got[name])


def test_deviation_and_padding() -> None:
    start = init(SPECS, jax.random.key(0))
    assert np.all(np.asarray(start["norm"]) == 1) and not np.asarray(start["table"])[11:].any()
    assert 0.4 < np.asarray(start["table"])[:11].std() < 0.6


def test_what_is_frozen_is_taken_out_and_put_back() -> None:
    specs = {**SPECS, "norm": replace(SPECS["norm"], frozen=True)}
    old, new = dict.fromkeys(SPECS, 1), dict.fromkeys(SPECS, 2)
    assert trained(specs, new) == {"up": 2, "norm": None, "table": 2}
    assert with_frozen(specs, trained(specs, new), old) == {"up": 2, "norm": 1, "table": 2}
    assert count(trained(specs, specs)) == count(SPECS) - 8 and stack(specs["norm"], 2).frozen
