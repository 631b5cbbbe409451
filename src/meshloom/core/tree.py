"""Trees of arrays: frozen dataclasses that JAX can walk, and the dotted path of each leaf."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")
Tree = Any


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose fields are the children of a JAX pytree. A field may be None (absent)."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    jax.tree_util.register_dataclass(cls, data_fields=[f.name for f in dataclasses.fields(cls)], meta_fields=[])  # type: ignore[arg-type]
    return cls


def path_name(path: tuple) -> str:
    """The dotted name of a JAX key path: `layers.attn.q`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Every leaf of a tree by its dotted path, in tree order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def map_named(fn: Callable, tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Like `jax.tree.map`, with the leaf's dotted path as the first argument of `fn`."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest, is_leaf=is_leaf)


class Same:
    """A value as a key that is equal to itself alone: for what is costly to compare and does not change."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of
