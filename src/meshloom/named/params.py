"""Models of other libraries under a layout: rules give the axes of their parameters names by path, and Meshloom's own tables split the names."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.core.config import nearest
from meshloom.core.layout import TABLES, Layout
from meshloom.core.mesh import make_mesh
from meshloom.core.spec import Spec, spec
from meshloom.parallel.table import STRATEGIES, parse

LARGE = 1 << 16
"""Elements of a parameter that no rule may leave out: smaller ones (norms, biases) are kept whole on each device."""
UNNAMED = "_"
"""Stands in a rule for an axis that nothing splits."""


class Sharded(NamedTuple):
    """A model's parameters under a layout; print it for what each device holds.

    params: the tree as it was given, its arrays on the devices, split by the layout's table `rest`. specs: path -> the array's spec.
    batch: names of the leading axes of a batch's arrays. unmatched: paths that no rule named, whole on each device."""

    params: Any
    specs: dict[str, Spec]
    layout: Layout
    mesh: Mesh
    batch: tuple[str, ...]
    unmatched: tuple[str, ...]

    def sharding(self, table: str, path: str) -> NamedSharding:
        """Where an array lies under a table."""
        return NamedSharding(self.mesh, self.layout.partition(table, self.specs[path].axes))

    @property
    def bytes(self) -> int:
        """Bytes of parameters that each device keeps."""
        return sum(self.layout.shard_bytes("rest", s, np.dtype(s.dtype).itemsize) for s in self.specs.values())

    def __str__(self) -> str:
        rows = []
        for path, s in self.specs.items():
            names = " ".join(f"{a}={n}" for a, n in zip(s.axes, s.shape))
            mine = "x".join(str(n) for n in self.layout.shard_shape("rest", s)) or "one number"
            rows.append((path, names, mine + (" (no rule names it)" if path in self.unmatched else "")))
        wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
        mesh = " ".join(f"{name}={size}" for name, size in self.layout.sizes.items()) or "one device"
        lines = [f"{path:{wide[0]}}  {names:{wide[1]}}  each device {mine}" for path, names, mine in rows]
        return "\n".join([f"mesh {mesh}", *lines, f"each device keeps {self.bytes:,} bytes of parameters"])


def is_array(x: Any) -> bool:
    """Whether a leaf of a model is an array (Equinox keeps functions among its leaves)."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def paths(tree: Any) -> list[str]:
    """The path of every leaf with slashes, "layers/0/kernel"; the `value` that Flax's NNX puts around each array is left out."""
    found = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [path.removesuffix("/value") for path in found]


def shard(params: Any, rules: Mapping[str, str], layout: str | Layout, batch: str = "batch", devices: list | None = None) -> Sharded:
    """A model's parameters laid out: `ml.shard(params, {"*/kernel": "embed ffn"}, "data=2 zero3=4")`.

    params: any tree with arrays. rules: pattern of a path (`*` is any text; the first that fits counts) -> axis names, `_` for an axis without one.
    layout: a spelling of Meshloom's strategies, or a Layout; names that its tables do not know are not split. batch: names of a batch's leading axes.
    Raises ValueError for a rule that fits no array (with the nearest path), a large array that no rule fits, a wrong number of names, sizes that
    the devices do not divide, and a mesh axis that would split nothing."""
    lay = layout if isinstance(layout, Layout) else _spelled(layout)
    leaves, tree = jax.tree.flatten(params)
    arrays = {path: leaf for path, leaf in zip(paths(params), leaves) if is_array(leaf)}
    if not arrays:
        raise ValueError(
            "There is no array in these parameters. Give the tree that holds them: variables['params'], nnx.state(model), a module."
        )
    axes, unmatched = _matched(rules, arrays)
    specs = {path: _spec(path, axes[path], leaf, lay) for path, leaf in arrays.items()}
    names = tuple(batch.split())
    _check_used(lay, specs, names)
    mesh = make_mesh(lay, devices)
    done = Sharded(None, specs, lay, mesh, names, unmatched)
    placed = [jax.device_put(x, done.sharding("rest", path)) if is_array(x) else x for path, x in zip(paths(params), leaves)]
    return done._replace(params=tree.unflatten(placed))


def _spelled(spelling: str) -> Layout:
    """The layout of a spelling, whose strategies' tables are applied to whatever has their names."""
    lay = Layout()
    for name, asked in parse(spelling).items():
        if asked.options:
            raise ValueError(
                f"Option '{asked.options[0]}' of '{name}' is made for Meshloom's own models; here a layout only places arrays. Write '{name}=...'."
            )
        if asked.devices > 1:
            lay = lay | STRATEGIES[name].layout(*asked.sizes)
    return lay


def _matched(rules: Mapping[str, str], arrays: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The axis names of every array by the first rule that fits its path, and the paths that none fits."""
    used: set[str] = set()
    axes: dict[str, tuple[str, ...]] = {}
    for path in arrays:
        for pattern, names in rules.items():
            if fnmatchcase(path, pattern):
                used.add(pattern)
                axes[path] = tuple(names.split())
                break
    for pattern in rules:
        if pattern not in used:
            fits = [path for path in arrays if fnmatchcase(path, pattern)]
            if fits:
                raise ValueError(f"Rule '{pattern}' fits only arrays that earlier rules have taken ({fits[0]}). Put it before them.")
            near = nearest(pattern.strip("*/"), [*arrays, *(path.rpartition("/")[2] for path in arrays)])
            guess = next((path for path in arrays if near and (path == near or path.endswith("/" + near))), next(iter(arrays)))
            raise ValueError(f"Rule '{pattern}' fits no array. The nearest path is '{guess}'. There is: {_listed(arrays)}.")
    unmatched = tuple(path for path in arrays if path not in axes)
    for path in unmatched:
        if np.size(arrays[path]) >= LARGE:
            near = nearest(path, rules) or next(iter(rules), "*")
            raise ValueError(
                f"No rule fits '{path}' of shape {np.shape(arrays[path])}, {np.size(arrays[path]):,} elements that each device would keep whole. "
                f"The nearest rule is '{near}'. Give it names, or keep it whole with '{path}': '{' '.join(UNNAMED * np.ndim(arrays[path]))}'."
            )
        axes[path] = (UNNAMED,) * np.ndim(arrays[path])
    return axes, unmatched


def _listed(found: Mapping[str, Any], most: int = 12) -> str:
    """The first names of many."""
    names = list(found)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _spec(path: str, names: tuple[str, ...], array: Any, lay: Layout) -> Spec:
    """The spec of one array. Refuses what the layout cannot split, with its path."""
    shape = np.shape(array)
    if len(names) != len(shape):
        raise ValueError(
            f"'{path}' has shape {shape}, {len(shape)} axes, and its rule names {len(names)}: '{' '.join(names)}'. '_' is an axis without a name."
        )
    names = tuple(f"_{i}" if name == UNNAMED else name for i, name in enumerate(names))
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"The rule of '{path}' has '{name}' twice: '{' '.join(names)}'. Axes of one array have different names.")
    made = spec(
        dict(zip(names, shape)), " ".join(names), dtype=str(np.asarray(array).dtype if isinstance(array, np.ndarray) else array.dtype)
    )
    for table in TABLES[:-1]:
        try:
            lay.partition(table, names)
            lay.shard_shape(table, made)
        except ValueError as wrong:
            raise ValueError(f"'{path}' ({' '.join(f'{a}={n}' for a, n in zip(names, shape))}): {wrong}") from None
    return made


def _check_used(lay: Layout, specs: Mapping[str, Spec], batch: tuple[str, ...]) -> None:
    """Refuses a mesh axis that splits neither a parameter nor the batch."""
    have = {name for s in specs.values() for name in s.axes}
    for axis, size in lay.sizes.items():
        rows = {name for table in TABLES[:-1] for name, axes in getattr(lay, table).items() if axis in axes}
        acts = {name for name, axes in lay.acts.items() if axis in axes}
        if size > 1 and not rows & have and not acts & set(batch):
            raise ValueError(
                f"Mesh axis '{axis}' of {size} devices would split nothing, and they would all do the same: it splits "
                f"{', '.join(sorted(rows | acts))}, and no rule gives an axis that name. The rules name: {', '.join(sorted(have))}."
            )


def batch_sharding(sharded: Sharded, x: Any) -> NamedSharding:
    """Where an array of a batch lies. Refuses sizes that the devices do not divide."""
    names = sharded.batch[: np.ndim(x)]
    lay = sharded.layout
    for name, n in zip(names, np.shape(x)):
        parts = lay.size(lay.acts.get(name, ()))
        if n % parts:
            raise ValueError(
                f"A batch with {n} along '{name}' cannot be split over {parts} devices ({' x '.join(lay.acts[name])}). "
                f"Use a multiple of {parts}: {math.ceil(n / parts) * parts}, say."
            )
    return NamedSharding(sharded.mesh, lay.partition("acts", names) if names else PartitionSpec())
