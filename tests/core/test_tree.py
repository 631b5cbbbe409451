"""Trees: frozen dataclasses that JAX walks, and the names of their leaves."""

import dataclasses

import jax
import pytest

from meshloom.core.tree import Same, map_named, named_leaves, pytree


@pytree
class Pair:
    """Two children."""

    a: object
    b: object


def test_names_are_dotted_paths_in_tree_order() -> None:
    assert named_leaves({"x": Pair(1, [2, 3]), "n": 4}) == {"n": 4, "x.a": 1, "x.b.0": 2, "x.b.1": 3}


def test_an_absent_field_is_no_leaf() -> None:
    assert named_leaves(Pair(1, None)) == {"a": 1}
    assert jax.tree.map(lambda v: v + 1, Pair(1, None)) == Pair(2, None)


def test_maps_with_names() -> None:
    assert map_named(lambda name, v, w: (name, v, w), Pair(1, 2), Pair(3, 4)) == Pair(("a", 1, 3), ("b", 2, 4))


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pair(1, 2).a = 3


def test_the_same_is_equal_to_itself_alone() -> None:
    a = {"x": 1}
    assert Same(a) == Same(a) and hash(Same(a)) == hash(Same(a)) and Same(a) != Same({"x": 1}) and Same(a) != a
