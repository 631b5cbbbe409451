"""Reads a family's rows (our path, their name, form) both ways: which tensor holds which parameter, and how one becomes the other.

A form is as in einops: "(h k) d -> d h k" turns their [heads * head, embed] into our [embed, heads, head]. Where one of theirs holds several of
ours, axis `n` counts them. Everything here is a view where it can be, so nothing is copied before the wanted part is cut out.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshloom.core.spec import AXES, Spec, is_spec
from meshloom.core.tree import Tree, named_leaves
from meshloom.models.base import Row

LETTERS = {name: letter for letter, name in AXES.items()}


class Place(NamedTuple):
    """One of their tensors: what it is made of."""

    theirs: str
    """Its name."""
    ours: tuple[str, ...]
    """Paths of the parameters in it."""
    layer: int | None
    """Number of its layer in the model, or None."""
    form: str
    """How theirs becomes ours."""
    sizes: Mapping[str, int]
    """Size of each letter in the form, without padding."""
    shape: tuple[int, ...]
    """Its shape."""
    at: tuple[int, ...] = ()
    """Where in the stack our part of it is: (layer,), (layer, expert), or () for what is in none."""


class Map(NamedTuple):
    """A model's map to another library's names."""

    places: tuple[Place, ...]
    """Every tensor that a checkpoint has, in file order (layer by layer)."""
    twins: Mapping[str, str]
    """Their name of a parameter that this model has only once (a tied head) -> ours. It may be stored twice; never differently."""
    ignored: re.Pattern[str]
    """Their names of buffers that hold nothing of the model."""


def sides(form: str) -> tuple[list[list[str]], list[list[str]]]:
    """The groups of letters on both sides of a form: "(h k) d -> d h k" is [[h, k], [d]], [[d], [h], [k]]."""
    left, right = ([group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", side)] for side in form.split("->"))
    return left, right


def rearrange(x: np.ndarray, form: str, sizes: Mapping[str, int]) -> np.ndarray:
    """x as the form says.  sizes: of every letter."""
    left, right = sides(form)
    flat = [letter for group in left for letter in group]
    x = x.reshape([sizes[letter] for letter in flat]).transpose([flat.index(letter) for group in right for letter in group])
    return x.reshape([math.prod(sizes[letter] for letter in group) for group in right])


def turned(form: str) -> str:
    """The form that undoes this one."""
    left, right = form.split("->")
    return f"{right.strip()} -> {left.strip()}"


def make_map(rows: Sequence[Row], specs: Tree, extra: Mapping[str, int] | None = None) -> Map:
    """The rows of a model with its sizes and layers filled in.  extra: sizes of letters that are not axes.
    Raises ValueError for a parameter that no row names."""
    leaves = named_leaves(specs, is_spec)
    once: list[Place] = []
    by_layer: dict[int, list[Place]] = {}
    twins, ignored = {}, []
    for row in rows:
        ours = (row.ours,) if isinstance(row.ours, str) else row.ours
        if row.ours == "":
            ignored.append(re.escape(row.theirs).replace(r"\{layer\}", r"\d+"))
        elif ours[0] not in leaves:
            twins[row.theirs] = "embed"
        else:
            for place in _places(row, ours, leaves[ours[0]], extra or {}):
                (once if place.layer is None else by_layer.setdefault(place.layer, [])).append(place)
    stacked = [place for layer in sorted(by_layer) for place in by_layer[layer]]
    named = {path for place in (*once, *stacked) for path in place.ours}
    unnamed = sorted(set(leaves) - named)
    if unnamed:
        raise ValueError(f"No row of the map says where {', '.join(unnamed)} is stored. Add one.")
    return Map((*once, *stacked), twins, re.compile("|".join(ignored) or r"(?!)"))


def _places(row: Row, ours: tuple[str, ...], s: Spec, extra: Mapping[str, int]) -> list[Place]:
    """The tensors of one row: one, or one a layer, or one an expert of each layer."""
    deep = (s.axes[:1] == ("layer",)) + ("{expert}" in row.theirs)
    axes, used = s.axes[deep:], s.used[deep:]
    sizes = {"n": len(ours), **{LETTERS[name]: size for name, size in zip(axes, used)}, **extra}
    shape = tuple(math.prod(sizes[letter] for letter in group) for group in sides(row.form)[0])
    numbers = row.layers or tuple(range(s.shape[0] if deep else 0))
    assert not deep or len(numbers) == s.shape[0], f"{row.theirs}: {len(numbers)} numbers for a stack of {s.shape[0]} layers"
    out = []
    for at in itertools.product(*(range(n) for n in s.shape[:deep])):
        layer = numbers[at[0]] if deep else None
        name = row.theirs.replace("{layer}", str(layer)).replace("{expert}", str(at[-1]) if deep else "")
        out.append(Place(name, ours, layer, row.form, sizes, shape, at))
    return out


def ours_from(tensor: np.ndarray, place: Place, path: str) -> np.ndarray:
    """One parameter (of one layer, without padding) from the tensor that holds it; a view where it can be."""
    x = rearrange(tensor, place.form, place.sizes)
    return x[place.ours.index(path)] if len(place.ours) > 1 else x


def theirs_from(parts: Sequence[np.ndarray], place: Place) -> np.ndarray:
    """Their tensor from the parameters in it, padding removed."""
    _, right = sides(place.form)
    axes = right[1:] if len(place.ours) > 1 else right
    used = tuple(slice(0, math.prod(place.sizes[letter] for letter in group)) for group in axes)
    x = np.stack([p[used] for p in parts]) if len(parts) > 1 else parts[0][used]
    return rearrange(x, turned(place.form), place.sizes)


def compare(found: Mapping[str, tuple[int, ...]], wanted: Map, what: str) -> str:
    """Checks that a checkpoint has exactly the model's tensors.  found: name -> shape.  Returns "loaded N of N tensors, ...".
    Raises ValueError listing what is missing, what is unexpected, and what has another shape."""
    need = {place.theirs: place.shape for place in wanted.places}
    missing = [name for name in need if name not in found]
    extra = [name for name in found if name not in need and name not in wanted.twins and not wanted.ignored.fullmatch(name)]
    shapes = [f"{n} is {list(found[n])}, not {list(need[n])}" for n in need if n in found and tuple(found[n]) != need[n]]
    if not (missing or extra or shapes):
        return f"loaded {len(need)} of {len(need)} tensors, 0 missing, 0 unexpected"
    parts = [f"{len(need) - len(missing)} of {len(need)} tensors are there"]
    parts += [f"{len(missing)} missing: {_list(missing)}"] if missing else []
    parts += [f"{len(extra)} that the model does not have: {_list(extra)}"] if extra else []
    parts += [f"{len(shapes)} of another shape: {_list(shapes)}"] if shapes else []
    raise ValueError(f"{what} does not fit its config.json. {'; '.join(parts)}. Correct config.json, or the file.")


def _list(names: Sequence[Any], most: int = 40) -> str:
    """Names in one line, the first `most` of them."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
