"""Mesh shapes and layout rules as people write them, "rows=2 cols=4" and "batch:rows hidden:cols", as one Layout; what is illegal is refused."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from meshloom.core.config import unknown
from meshloom.core.layout import Layout

Sizes = str | Mapping[str, int]
Rules = str | Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Place:
    """Where the tensors of one program lie: the layout, whose table `acts` holds the rules.

    tensors: the names of every tensor that the program has had so far. sizes: name -> its sizes."""

    layout: Layout
    tensors: set[tuple[str, ...]] = field(default_factory=set, compare=False)
    sizes: dict[str, set[int]] = field(default_factory=dict, compare=False)

    def __hash__(self) -> int:
        return hash((*self.layout.sizes.items(), *self.layout.acts.items()))

    def axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes that split a name, outermost first."""
        return self.layout.acts.get(name, ())

    def split(self, names: Iterable[str]) -> frozenset[str]:
        """Mesh axes that split any of the names."""
        return frozenset(a for name in names for a in self.axes(name))

    def parts(self, name: str) -> int:
        """Devices that share a name."""
        return self.layout.size(self.axes(name))

    def partition(self, names: tuple[str, ...]) -> PartitionSpec:
        """The PartitionSpec of a tensor with these names."""
        return PartitionSpec(*(self.axes(name) or None for name in names))

    def check(self, names: tuple[str, ...], sizes: tuple[int, ...] | None = None) -> None:
        """Refuses two names of one tensor on one mesh axis, and (sizes: of the whole tensor) a size that its devices do not divide."""
        self.tensors.add(names)
        used: dict[str, str] = {}
        for name in names:
            for axis in self.axes(name):
                if axis in used:
                    raise ValueError(
                        f"The rules split both '{used[axis]}' and '{name}' over mesh axis '{axis}', and one tensor ({' '.join(names)}) has both. "
                        f"Give one of them another mesh axis or none, or rename it in the program before the two meet."
                    )
                used[axis] = name
        for name, size in zip(names, sizes or ()):
            self.sizes.setdefault(name, set()).add(size)
            if size % self.parts(name):
                raise ValueError(
                    f"Axis '{name}' of size {size} cannot be split over {self.parts(name)} devices (mesh axes {', '.join(self.axes(name))}). "
                    f"Use a size that {self.parts(name)} divides, or leave '{name}' out of the rules."
                )

    def check_seen(self) -> None:
        """Refuses a rule for a name that no tensor of the program had."""
        seen = {name for names in self.tensors for name in names}
        for name in self.layout.acts:
            if name not in seen:
                raise ValueError(f"A rule splits '{name}'. {unknown('axis of that name in this program:', name, seen)}")

    def legal(self) -> list[dict[str, tuple[str, ...]]]:
        """Every table that sends each name to one mesh axis or to none, and that neither splits two names of one tensor over the same mesh axis
        nor a size over devices that do not divide it. The empty table comes first."""
        names = sorted(n for n in {name for names in self.tensors for name in names} if n.isidentifier())
        beside = {n: {m for names in self.tensors if n in names for m in names if m != n} for n in names}
        tables: list[dict[str, tuple[str, ...]]] = [{}]
        for name in names:
            fits = [a for a, n in self.layout.sizes.items() if n > 1 and all(size % n == 0 for size in self.sizes.get(name, ()))]
            tables += [{**t, name: (a,)} for t in tables for a in fits if all(t.get(m) != (a,) for m in beside[name])]
        return tables


def layout(mesh: Sizes | Layout, rules: Rules = "") -> Layout:
    """A mesh shape and rules as a Layout with one table, `acts`. A Layout for `mesh` is taken as it is, with the rules in place of its table.
    Raises ValueError for what it cannot read, a mesh axis that is not there (with the nearest), and one that a rule gives twice."""
    if isinstance(mesh, Layout):
        return Layout(mesh.sizes, acts=_rules(rules, mesh.sizes) if rules else mesh.acts, platform=mesh.platform)
    sizes = _sizes(mesh)
    return Layout(sizes, acts=_rules(rules, sizes))


def _sizes(mesh: Sizes) -> dict[str, int]:
    """The devices along each mesh axis, outermost first."""
    pairs = [word.partition("=")[::2] for word in mesh.split()] if isinstance(mesh, str) else [(k, str(v)) for k, v in mesh.items()]
    sizes: dict[str, int] = {}
    for name, size in pairs:
        if not name or not size.isdigit() or int(size) < 1:
            raise ValueError(f"'{name}={size}' is no mesh axis. Write names and numbers of devices: 'rows=2 cols=4'.")
        if name in sizes:
            raise ValueError(f"Mesh axis '{name}' is given twice. Give it once.")
        sizes[name] = int(size)
    return sizes


def _rules(rules: Rules, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Name -> mesh axes. Mesh axes of one device split nothing and are left out."""
    pairs = [word.partition(":")[::2] for word in rules.split()] if isinstance(rules, str) else list(rules.items())
    table: dict[str, tuple[str, ...]] = {}
    for name, given in pairs:
        axes = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
        if not name or not all(axes):
            raise ValueError(
                f"'{name}:{given}' is no rule. Write names and mesh axes: 'batch:rows hidden:cols', or 'batch:rows,cols' for both."
            )
        if name in table:
            raise ValueError(f"Two rules split '{name}'. Give it one rule; 'name:rows,cols' splits it over both mesh axes.")
        for axis in axes:
            if axis not in sizes:
                raise ValueError(f"Rule '{name}:{','.join(axes)}': {unknown('mesh axis', axis, sizes)}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"Rule '{name}:{','.join(axes)}' names a mesh axis twice. Name it once.")
        table[name] = tuple(a for a in axes if sizes[a] > 1)
    return {name: axes for name, axes in table.items() if axes}


def spelled(lay: Layout) -> str:
    """A layout as it is written: "mesh rows=2 cols=4, rules batch:rows hidden:cols"."""
    mesh = " ".join(f"{name}={size}" for name, size in lay.sizes.items())
    rules = " ".join(f"{name}:{','.join(axes)}" for name, axes in lay.acts.items())
    return f"mesh {mesh or 'of one device'}, rules {rules or 'none'}"
