"""Parameters that training leaves as they are, chosen by patterns over their dotted paths."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax

from meshloom.core.config import nearest
from meshloom.core.spec import Spec, is_spec, with_frozen
from meshloom.core.tree import Tree, map_named, named_leaves
from meshloom.models.base import Model


def frozen(model: Model, c: Any, patterns: Sequence[str]) -> Model:
    """The model with every parameter that a pattern matches marked as frozen; the model itself for none.  patterns: as `layers.attn.*`; `*` stands for
    any characters, dots too.  Raises ValueError where a pattern matches no parameter of c, or nothing would be left to train."""
    if not patterns:
        return model
    paths = named_leaves(model.specs(c), is_spec)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f"train.freeze has {pattern!r}, which matches no parameter of the model.{_near(pattern, list(paths))}")

    def marked(path: str, s: Spec) -> Spec:
        return replace(s, frozen=True) if any(fnmatchcase(path, pattern) for pattern in patterns) else s

    def specs(c: Any) -> Tree:
        return map_named(marked, model.specs(c), is_leaf=is_spec)

    if not any(trains(s) for s in jax.tree.leaves(specs(c), is_leaf=is_spec)):
        raise ValueError(f"train.freeze {list(patterns)} freezes every parameter, and nothing is left to train. Leave some of them out.")
    settle = lambda c, params, sums: with_frozen(specs(c), model.settle(c, params, sums), params)
    return model._replace(specs=specs, settle=settle)


def trains(s: Spec) -> bool:
    """Whether a parameter has a gradient."""
    return not s.frozen and s.role != "settled"


def frozen_paths(specs: Tree) -> tuple[str, ...]:
    """The dotted paths of what is frozen."""
    return tuple(path for path, s in named_leaves(specs, is_spec).items() if s.frozen)


def _near(pattern: str, paths: list[str]) -> str:
    """What a pattern may have meant: a whole branch, or the path or branch spelled most like it; else all first names."""
    branches = {path[:i] + ".*" for path in paths for i, letter in enumerate(path) if letter == "."}
    inside = f"{pattern}.*" if f"{pattern}.*" in branches else nearest(pattern, [*paths, *sorted(branches)])
    return f" Did you mean {inside!r}?" if inside else f" There is: {', '.join(paths)}."
