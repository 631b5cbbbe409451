"""From another library's tensors to a model's tree, leaf by leaf, straight to where each shard lives."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree, map_named
from meshloom.models.base import Model, Row
from meshloom.weights.rows import Map, Place, compare, make_map, ours_from


class Stored(Protocol):
    """A tensor that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def view(self) -> np.ndarray:
        """Its values."""
        ...


class Source(NamedTuple):
    """What a checkpoint says it is, before any weight is read."""

    name: str
    """Where it lies."""
    model: Model
    config: Any
    tensors: Mapping[str, Stored]
    rows: tuple[Row, ...]
    """The map of these tensors to the model's parameters."""
    sizes: Mapping[str, int]
    """Letters of the rows that are not axes."""
    said: dict[str, Any]
    """config.json as it is, {} where there is none."""
    generation: dict[str, Any]
    """generation_config.json; where it has no token ids, those of config.json."""

    def map(self) -> Map:
        """Which tensor holds which parameter."""
        return make_map(self.rows, self.model.specs(self.config), self.sizes)


class Loaded(NamedTuple):
    """A model's weights, and one line about them."""

    weights: Tree
    report: str


FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))


def load(source: Source, shardings: Tree | None = None, dtype: str | None = None) -> Loaded:
    """The weights of a checkpoint.  shardings: where each goes (not given: this process's first device).  dtype: not given, that of the specs.
    Host memory: about one shard of one stack at a time.  Raises ValueError listing every name that does not fit."""
    report = check(source)
    wanted = source.map()
    places: dict[str, list[Place]] = {}
    for place in wanted.places:
        for path in place.ours:
            places.setdefault(path, []).append(place)
    here = SingleDeviceSharding(jax.local_devices()[0])

    def one(path: str, s: Spec, where: Any) -> jax.Array:
        kind = np.dtype(jnp.dtype(dtype or s.dtype))
        return jax.make_array_from_callback(s.shape, where, lambda index: _part(source, places[path], path, s, index, kind))

    specs = source.model.specs(source.config)
    where = jax.tree.map(lambda _: here, specs, is_leaf=is_spec) if shardings is None else shardings
    return Loaded(map_named(one, specs, where, is_leaf=is_spec), report)


def check(source: Source) -> str:
    """Checks that a checkpoint holds exactly the model's tensors, reading only their names and shapes (and a head stored beside a tied
    embedding).  Returns "loaded N of N tensors, 0 missing, 0 unexpected".  Raises ValueError listing every name that does not fit."""
    wanted = source.map()
    _check_tie(source, wanted)
    report = compare({name: tuple(t.shape) for name, t in source.tensors.items()}, wanted, source.name)
    other = [f"{p.theirs} ({source.tensors[p.theirs].dtype})" for p in wanted.places if source.tensors[p.theirs].dtype not in FLOATS]
    if other:
        raise ValueError(
            f"{source.name} holds tensors that are not plain floating point: {', '.join(other[:8])}. Take an unquantised checkpoint."
        )
    return report


def _part(source: Source, places: list[Place], path: str, s: Spec, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """One device's part of a parameter, padding zero.  places: its tensors, one for each place in a stack.  index: the part."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, s.shape)]
    out = np.zeros([stop - start for start, stop in bounds], dtype)
    deep = len(places[0].at)
    inner, used = bounds[deep:], s.used[deep:]
    cut = tuple(slice(start, max(start, min(stop, size))) for (start, stop), size in zip(inner, used))
    fill = tuple(slice(0, part.stop - part.start) for part in cut)
    if not math.prod(part.stop - part.start for part in cut):
        return out
    for place in places:
        if all(start <= i < stop for i, (start, stop) in zip(place.at, bounds)):
            part = ours_from(source.tensors[place.theirs].view(), place, path)[cut]
            out[(*(i - start for i, (start, _) in zip(place.at, bounds)), *fill)] = part
    return out


def _check_tie(source: Source, wanted: Map) -> None:
    """Refuses a head that contradicts the tie flag: absent where the model is untied, different from the embedding where it is tied."""
    heads = {place.theirs for place in wanted.places if place.ours == ("head",)}
    if heads and not heads & set(source.tensors):
        raise ValueError(
            f"{source.name} says that its head is not tied to the embedding (tie_word_embeddings false), but {heads.pop()} is not there. "
            f"Set the flag to true if it is tied, or add the tensor."
        )
    embed = next(place.theirs for place in wanted.places if place.ours == ("embed",))
    for twin in wanted.twins:
        if twin in source.tensors and embed in source.tensors:
            a, b = source.tensors[twin], source.tensors[embed]
            if a.shape != b.shape or not np.array_equal(a.view(), b.view()):
                raise ValueError(
                    f"{source.name} says that its head is tied to the embedding (tie_word_embeddings true), but {twin} differs from {embed}. "
                    f"Set the flag to false if both are to be used, or remove {twin}."
                )
