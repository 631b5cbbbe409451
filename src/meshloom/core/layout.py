"""Layouts: five small tables from array-axis names to mesh axes. A strategy is a Layout; a product of strategies is their union."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from jax.sharding import PartitionSpec

from meshloom.core.spec import Spec

Table = Mapping[str, tuple[str, ...]]
TABLES = ("rest", "step", "live", "grad", "acts")
KEPT = ("live", "step", "grad", "rest")
"""The tables of parameters, from the fewest splits to the most: what splits a parameter in one of them splits it in the later ones too."""


ATTENTION = ("heads", "kv_heads", "head", "query_rank", "latent", "key_rank", "key_value", "value")
INSIDE = frozenset((*ATTENTION, "ffn", "router", "expert", "expert_ffn"))
"""Axes of what a layer computes in its work region, where activations are split over `Layout.work`."""
PIPE = "pipe"
"""The mesh axis whose devices run different layers (parallel/pipe.py)."""


@dataclass(frozen=True)
class Layout:
    """Where arrays live. Each table maps an array-axis name to the mesh axes that split it; a name that is absent is not split.

    sizes: devices on each mesh axis, outermost first.
    rest:  parameters (the fp32 master), optimizer state and average between steps.
    step:  parameters for the length of one step.     live: parameters while their layer runs.
    grad:  gradients as they accumulate.              acts: activations.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    rest: Table = field(default_factory=dict)
    step: Table = field(default_factory=dict)
    live: Table = field(default_factory=dict)
    grad: Table = field(default_factory=dict)
    acts: Table = field(default_factory=dict)
    platform: str = "cpu"
    """What the devices are: "cpu", "gpu" or "tpu". Chooses kernels, never results."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Strategy -> the options of its spelling, where it has any."""

    def __or__(self, other: "Layout") -> "Layout":
        """Both strategies at once. An axis that both split is split by one mesh axis after the other; a mesh axis of two sizes is refused.

        Of a parameter's axis, the mesh axes that split it longest come first, so that what one table's devices gather is one part under the next.
        """
        sizes = dict(self.sizes)
        for name, size in other.sizes.items():
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"Mesh axis '{name}' is asked for twice, with {sizes[name]} and with {size} devices. Give it once.")
        tables = {t: _union(getattr(self, t), getattr(other, t)) for t in TABLES}
        options = {**self.options, **other.options}
        return Layout(sizes, platform=self.platform, options=options, **_nested(tables, _square(options)))

    @property
    def devices(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(self.sizes.values())

    @property
    def batch(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return self.acts.get("batch", ())

    @property
    def tokens(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold different tokens: those that split the batch, and those that split whole sequences."""
        return tuple(dict.fromkeys((*self.batch, *self.acts.get("whole_seq", ()))))

    @property
    def ring(self) -> tuple[str, ...]:
        """Mesh axes that split the sequence inside attention too: keys and values go around them."""
        return self.acts.get("attend_seq", ())

    @property
    def exchange(self) -> tuple[str, ...]:
        """Mesh axes that split the sequence outside attention and heads inside it."""
        return tuple(a for a in self.acts.get("whole_seq", ()) if a not in self.ring)

    @property
    def inner(self) -> tuple[str, ...]:
        """Mesh axes that split the batch inside a layer, beside those that split it everywhere."""
        return self.acts.get("work_batch", ())

    @property
    def stream(self) -> tuple[str, ...]:
        """Mesh axes that split the residual stream's embed: statistics of norms are summed over them."""
        return self.acts.get("embed", ())

    @property
    def summed(self) -> tuple[str, ...]:
        """Mesh axes over which the sums of an objective are parts."""
        return tuple(dict.fromkeys((*self.tokens, *self.inner)))

    @property
    def square(self) -> tuple[str, str, int] | None:
        """Mesh axes and side of the square of devices over which products of layers stream panels (`tensor2d=2x2:stream`), or None."""
        if not (axes := _square(self.options)):
            return None
        rows, cols = axes
        return rows, cols, self.sizes[rows]

    @property
    def stages(self) -> int:
        """Stages of a pipeline; 1 for none."""
        return self.size(self.live.get("layer", ()))

    @property
    def within(self) -> "Layout":
        """The layout that one stage of a pipeline sees."""
        tables = {t: {name: tuple(a for a in axes if a != PIPE) for name, axes in getattr(self, t).items()} for t in TABLES}
        return replace(self, **tables) if PIPE in self.sizes else self

    @property
    def work(self) -> tuple[str, ...]:
        """Mesh axes that split a layer's work on the same tokens: those of the live weights (tensor parallelism) that split no tokens."""
        return tuple(dict.fromkeys(axis for axes in self.live.values() for axis in axes if axis not in self.tokens))

    def even(self, rows: int) -> int:
        """`rows` of a batch, rounded up to what the devices that split it share evenly."""
        shards = self.size((*self.batch, *self.inner))
        return -(-rows // shards) * shards

    def size(self, axes: tuple[str, ...]) -> int:
        """Devices over these mesh axes."""
        return math.prod(self.sizes[a] for a in axes)

    def splits(self, table: str, name: str) -> tuple[str, ...]:
        """Mesh axes that split an array axis under one table: for `work_batch`, those of `batch` and its own."""
        own = getattr(self, table).get(name, ())
        return (*getattr(self, table).get("batch", ()), *own) if name == "work_batch" else own

    def entries(self, table: str, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Mesh axes that split each axis of an array with these names under one table. A matrix whose products stream it stays split over the
        square's rows while its layer runs; over a pipeline, embed is split in the matrices of layers alone. What stands behind a slash in a name
        says that replicas share the axis out (train/replicas.py)."""
        known = self._known.get((table, axes))
        if known is None:
            known = self._known[table, axes] = tuple(self._entries(table, axes))
        return list(known)

    @cached_property
    def _known(self) -> dict[tuple[str, tuple[str, ...]], tuple[tuple[str, ...], ...]]:
        """What `entries` has answered: a layout never changes, and plans ask the same again and again."""
        return {}

    def _entries(self, table: str, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [self.splits(table, name) for name in axes]
        plain = [name.partition("/")[0] for name in axes]
        if PIPE in getattr(self, table).get("embed", ()) and "embed" in plain and not INSIDE & set(plain):
            found[plain.index("embed")] = tuple(a for a in found[plain.index("embed")] if a != PIPE)
        if table == "live" and self.square and "embed" in axes and INSIDE & set(axes):
            found[axes.index("embed")] = (self.square[0], *found[axes.index("embed")])
        return found

    def partition(self, table: str, axes: tuple[str, ...]) -> PartitionSpec:
        """The PartitionSpec of an array with these axis names under one table. A mesh axis that would split two axes is an error naming both."""
        entries = self.entries(table, axes)
        used: dict[str, str] = {}
        for name, mesh_axes in zip(axes, entries):
            for mesh_axis in mesh_axes:
                if mesh_axis in used:
                    raise ValueError(
                        f"Mesh axis '{mesh_axis}' would split both '{used[mesh_axis]}' and '{name}' of one array ({' '.join(axes)}). "
                        f"Let it split one of them in table '{table}'."
                    )
                used[mesh_axis] = name
        return PartitionSpec(*(mesh_axes or None for mesh_axes in entries))

    def gathered(self, before: str, after: str, axes: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Which axis of an array with these names is split under table `before` and over no axis under `after`, and by which mesh axes: along it
        the array is gathered on the way there, and scattered on the way back.  Returns (0, ()) where nothing moves."""
        kept = {a for want in self.entries(after, axes) for a in want}
        found = [(at, tuple(a for a in have if a not in kept)) for at, have in enumerate(self.entries(before, axes))]
        found = [one for one in found if one[1]]
        assert len(found) <= 1, f"{' '.join(axes)} would be gathered along several axes from '{before}' to '{after}'"
        return found[0] if found else (0, ())

    def exchanged(self, axes: tuple[str, ...]) -> int | None:
        """The axis of a layer's array, stacked, that a pipeline's devices split between steps and exchange for whole layers in one; None for none."""
        split = [at for at, have in enumerate(self.entries("rest", axes)) if PIPE in have]
        return split[0] if split and axes[0] == "layer" else None

    def shard_shape(self, table: str, s: Spec) -> tuple[int, ...]:
        """One device's shape of an array under a table. Sizes that do not divide are refused with a sentence."""
        shape = []
        for size, name, mesh_axes in zip(s.shape, s.axes, self.entries(table, s.axes), strict=True):
            parts = self.size(mesh_axes)
            if size % parts:
                raise ValueError(
                    f"Axis '{name}' of size {size} cannot be split over {parts} devices ({' x '.join(mesh_axes)}). "
                    f"Use a number of devices that divides {size}, or another size."
                )
            shape.append(size // parts)
        return tuple(shape)

    def shard_bytes(self, table: str, s: Spec, dtype_bytes: int) -> int:
        """One device's bytes of an array under a table, stored with dtype_bytes an element."""
        return math.prod(self.shard_shape(table, s)) * dtype_bytes

    def without(self, *names: str) -> "Layout":
        """The same layout with some axis names not split in any table (sizes stay)."""
        return Layout(
            self.sizes, *({k: v for k, v in getattr(self, t).items() if k not in names} for t in TABLES), self.platform, self.options
        )


def _union(a: Table, b: Table) -> dict[str, tuple[str, ...]]:
    """Both tables; where both split an axis, a's mesh axes come first. A mesh axis named by both is kept once."""
    return {name: tuple(dict.fromkeys((*a.get(name, ()), *b.get(name, ())))) for name in dict.fromkeys((*a, *b))}


def _square(options: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Rows and columns of the square over which products stream panels, where an option asks for that."""
    return ("rows", "cols") if any("stream" in said for said in options.values()) else ()


def _nested(tables: Mapping[str, Table], square: tuple[str, ...]) -> dict[str, Table]:
    """The tables with each axis split first by the mesh axes that split it in most tables; by those of a square before all, whose
    panels are whole parts; by a pipeline's last, which is exchanged first."""
    count = lambda name, mesh_axis: sum(mesh_axis not in tables[t].get(name, ()) for t in KEPT)
    leaves = lambda name, mesh_axis: 0 if mesh_axis in square else count(name, mesh_axis) + (mesh_axis == PIPE) / 2
    return {t: {name: tuple(sorted(axes, key=lambda a: leaves(name, a))) for name, axes in tables[t].items()} for t in TABLES}


ONE_DEVICE = Layout()
assert tuple(f.name for f in fields(Layout))[1:-2] == TABLES
