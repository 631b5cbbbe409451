"""What the pictures of a layout show: the mesh, one device's part of every kind of array, the collectives of a layer.  From specs and formulas;
makes no array and asks for no device.  `picture.py` draws it, `sketch.py` prints it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshloom.core.layout import PIPE, TABLES, Layout
from meshloom.core.order import padded, true_place
from meshloom.core.spec import Spec, is_spec, spec
from meshloom.core.tree import Tree, named_leaves
from meshloom.models.base import Model
from meshloom.ops.loss import chunk_count
from meshloom.parallel.base import Shapes, moved
from meshloom.parallel.table import STRATEGIES, parse, spell
from meshloom.plan.explain import size
from meshloom.plan.stages import Pipeline, pipeline
from meshloom.plan.traffic import Traffic, traffic

MOMENTS = {
    "rest": "between steps, fp32",
    "step": "for the length of a step",
    "live": "while its layer runs",
    "grad": "gradients as they add up",
    "acts": "in a micro-batch",
}
"""The tables of a layout, and when an array lies as they say."""
ACTIVATIONS = {
    "tokens": ("batch whole_seq", "int32"),
    "residual stream": ("batch seq embed", ""),
    "input of a layer's half": ("batch whole_seq whole_embed", ""),
    "queries": ("work_batch whole_seq heads head", ""),
    "queries in attention": ("work_batch attend_seq attend_heads head", ""),
    "keys, values": ("work_batch whole_seq kv_heads head", ""),
    "inside the MLP": ("work_batch whole_seq ffn", ""),
    "scores of the experts": ("work_batch whole_seq router", "float32"),
    "inside the experts": ("expert assigned expert_ffn", ""),
    "logits": ("work_batch whole_seq vocab", "float32"),
}
"""What a step computes -> its axes, and its type where that is not the arithmetic's."""
INSIDE = {"work_batch": "batch", "whole_embed": "embed", "attend_seq": "whole_seq", "attend_heads": "heads"}
"""Names of axes inside a layer or its attention -> those outside, whose sizes they have; these are shown where a layout cuts both alike."""
SHOWN = {"whole_embed": "embed", "attend_heads": "heads"}
"""Names that are shown as others in any case."""
MOST = 16
"""Devices that are all drawn; of larger meshes the first few along each axis and the last."""


class MeshAxis(NamedTuple):
    """One axis of the mesh. asked: the words that asked for it. what: these strategies, in a phrase ("" where the axis
    before it says the same). splits: names -> the tables that split them."""

    name: str
    size: int
    asked: str
    what: str
    splits: dict[str, tuple[str, ...]]

    @property
    def said(self) -> str:
        """Which names it splits, and when: names that are alike together."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, tables in self.splits.items():
            alike.setdefault(tables, []).append(name)
        said = [f"{', '.join(names)} ({'always' if len(tables) == len(TABLES) else ', '.join(tables)})" for tables, names in alike.items()]
        return "splits " + "; ".join(said) if said else "splits no array"


class Cut(NamedTuple):
    """One axis of an array. over: the mesh axes that split it, outermost first. parts: how many pieces. own: the device's piece, from 0."""

    name: str
    size: int
    over: tuple[str, ...]
    parts: int
    own: int


class Part(NamedTuple):
    """What the device holds of an array at one moment (a key of MOMENTS). bytes: of all arrays of the kind. copies: devices with the same piece.
    note: what else there is to say."""

    moment: str
    cuts: tuple[Cut, ...]
    bytes: int
    dtype: str
    copies: int
    note: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """One array's shape on the device."""
        return tuple(cut.size // cut.parts for cut in self.cuts)


class Held(NamedTuple):
    """A kind of array: those with the same axes and sizes. paths: of each. axes, shape: of the first, whole. parts: what the device holds when."""

    paths: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Drawing(NamedTuple):
    """All that a picture says. device, place: the one whose part is shown, and its coordinates by mesh axis."""

    title: str
    spelling: str
    how: str
    sizes: Mapping[str, int]
    axes: tuple[MeshAxis, ...]
    device: int
    place: dict[str, int]
    weights: tuple[Held, ...]
    kept: tuple[Held, ...]
    acts: tuple[Held, ...]
    traffic: Traffic

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())


def drawing(model: Model, spelling: str, x: Shapes, seq: int, kept: Mapping[str, Tree], device: int = 0) -> Drawing:
    """What to show of a layout.  x: the shapes of a step.  seq: tokens of a whole sequence.  kept: kind -> specs stored beside the parameters.
    device: whose part is shown.  Raises ValueError where the mesh has none such, or a size does not divide."""
    c, lay = x.config, x.layout
    if not 0 <= device < lay.devices:
        raise ValueError(
            f"There is no device {device}: this layout has {lay.devices}, counted from 0. Use --device 0 to {lay.devices - 1}."
        )
    place = coordinates(lay.sizes, device)
    pipe = pipeline(model, x)
    weights, others = arrays(x, named_leaves(model.specs(c), is_spec), place, kept, pipe)
    acts = activations(x, seq, place)
    names = {axis for held in (*weights, *acts) for axis in held.axes}
    cut = f"{x.micro} micro-batch{'es' * (x.micro > 1)}"
    return Drawing(
        title=f"{model.name}: {c.layers} layers, embed {c.embed}, {c.heads} heads ({c.kv_heads} for keys), ffn {c.ffn}, vocabulary {c.vocab}",
        spelling=spell(parse(spelling)),
        how=f"{x.rows * lay.size(lay.batch) * x.micro} sequences of {seq} tokens in {cut}, {x.dtype}, remat {x.remat}, {lay.platform}",
        sizes=lay.sizes,
        axes=mesh_axes(spelling, lay, names, {PIPE: (pipe.size, pipe.held)} if pipe else {}),
        device=device,
        place=place,
        weights=weights,
        kept=others,
        acts=acts,
        traffic=traffic(model, spelling, x),
    )


def coordinates(sizes: Mapping[str, int], device: int) -> dict[str, int]:
    """A device's place along every mesh axis; the last axis counts fastest, as in the mesh."""
    place: dict[str, int] = {}
    for name in reversed(sizes):
        device, place[name] = divmod(device, sizes[name])
    return {name: place[name] for name in sizes}


def mesh_axes(spelling: str, lay: Layout, names: set[str], more: Mapping[str, tuple[str, ...]] | None = None) -> tuple[MeshAxis, ...]:
    """Every mesh axis, with the strategies that asked for it.  names: axes that the model's arrays have.  more: what else there is to say of one."""
    found = []
    for name, devices in lay.sizes.items():
        words, phrases = [], []
        for strategy, asked in parse(spelling).items():
            s = STRATEGIES[strategy]
            if name in s.layout(*asked.sizes).sizes:
                words.append(spell({strategy: asked}))
                phrases += s.does(asked.options)
        splits: dict[str, tuple[str, ...]] = {}
        for table in TABLES:
            for axis, over in getattr(lay, table).items():
                if name in over and axis in names:
                    splits[axis] = (*splits.get(axis, ()), table)
        what = "; ".join((*phrases, *(more or {}).get(name, ())))
        said = found and (found[-1].asked, found[-1].what or what) == (" ".join(words), what)
        found.append(MeshAxis(name, devices, " ".join(words), "" if said else what, splits))
    return tuple(found)


def cuts(lay: Layout, table: str, s: Spec, place: Mapping[str, int]) -> tuple[Cut, ...]:
    """How a table splits each axis of an array.  Raises ValueError where a size does not divide."""
    found = []
    lay.shard_shape(table, s)
    entries = [split(lay, name) for name in s.axes] if table == "acts" else lay.entries(table, s.axes)
    for name, whole, over in zip(s.axes, s.shape, entries):
        found.append(Cut(SHOWN.get(name, name), whole, over, lay.size(over), piece(lay.sizes, over, place)))
    return tuple(found)


def split(lay: Layout, name: str) -> tuple[str, ...]:
    """The mesh axes that split an axis of activations. Inside a layer, rows are split as everywhere and over `lay.inner` besides, embed only where
    the weights that it meets are split too; inside attention heads are split over `lay.exchange` besides; experts have the tokens of all devices that split them."""
    own = lay.acts.get(name, ())
    inside = {
        "work_batch": (*lay.batch, *own),
        "whole_embed": tuple(axis for axis in lay.stream if axis in lay.live.get("embed", ())),
        "assigned": tuple(axis for axis in lay.tokens if axis not in lay.acts.get("expert", ())),
        "attend_heads": (*lay.acts.get("heads", ()), *lay.exchange),
    }
    return inside.get(name, own)


def piece(sizes: Mapping[str, int], over: tuple[str, ...], place: Mapping[str, int]) -> int:
    """Which piece of an axis that mesh axes split a device has, from 0.  place: the device's coordinates."""
    own = 0
    for axis in over:
        own = own * sizes[axis] + place[axis]
    return own


def part(lay: Layout, moment: str, s: Spec, place: Mapping[str, int], dtype: str, arrays: int = 1, note: str = "") -> Part:
    """What one device holds of `arrays` arrays like s at a moment."""
    found = cuts(lay, moment, s, place)
    here = math.prod(cut.size // cut.parts for cut in found)
    copies = lay.devices // math.prod(cut.parts for cut in found)
    return Part(moment, found, arrays * here * jnp.dtype(dtype).itemsize, dtype, copies, note)


def arrays(
    x: Shapes, leaves: Mapping[str, Spec], place: Mapping[str, int], kept: Mapping[str, Tree], pipe: Pipeline | None = None
) -> tuple[tuple[Held, ...], tuple[Held, ...]]:
    """Every kind of parameter at its four moments; and what is stored beside them that lies as no parameter does (factored moments).
    leaves: the parameters between steps, by path; those of x are as a step runs them."""
    lay = x.layout
    state = {kind: _kinds(named_leaves(tree, is_spec)) for kind, tree in kept.items()}
    weights = []
    for key, group in _kinds(leaves).items():
        s, beside = next(iter(group.values())), []
        for kind, groups in state.items():
            mirrors = [path for path in groups.get(key, {}) if path.endswith(tuple(group))]
            taken = [groups[key].pop(path) for path in mirrors]
            if taken:
                beside.append((kind, sum(lay.shard_bytes("rest", a, jnp.dtype(a.dtype).itemsize) for a in taken)))
        weights.append(Held(tuple(group), s.axes, s.shape, _weight(x, s, x.leaves[next(iter(group))], len(group), place, beside, pipe)))
    others = []
    for kind, group in ((kind, group) for kind, groups in state.items() for group in groups.values() if group):
        s = next(iter(group.values()))
        if s.axes:  # counters lie on every device
            paths = tuple(f"{kind}.{path}".replace(".layers.", ".") for path in group)
            others.append(Held(paths, s.axes, s.shape, (part(lay, "rest", s, place, s.dtype, len(group)),)))
    return tuple(weights), tuple(others)


def _kinds(leaves: Mapping[str, Spec]) -> dict[Any, dict[str, Spec]]:
    """Arrays by what makes them of one kind: their axes and sizes, in any order."""
    found: dict[Any, dict[str, Spec]] = {}
    for path, s in leaves.items():
        found.setdefault(frozenset(zip(s.axes, s.shape)), {})[path] = s
    return found


def _weight(
    x: Shapes, s: Spec, run: Spec, n: int, place: Mapping[str, int], beside: list[tuple[str, int]], pipe: Pipeline | None
) -> tuple[Part, ...]:
    """n parameters at rest, in a step, in their layer, and their gradients.  run: as a step has them, with a pipeline's empty slots.
    beside: kind and bytes of what is stored like them."""
    lay = x.layout
    rest = part(lay, "rest", s, place, s.dtype, n, "; ".join(f"{kind}: + {size(held)}" for kind, held in beside))
    gathered, cast = moved(lay, "rest", "step", s), s.dtype != x.dtype
    how = "gathered" if gathered else "cast" if cast else "the same arrays"
    if pipe and s.axes[0] == "layer":
        how = pipe.stage(place[PIPE]) + (f", {how}" if gathered else "")
    step = part(lay, "step", run, place, x.dtype, n, how)
    one = replace(s, shape=s.shape[1:], axes=s.axes[1:], used=s.used[1:]) if s.axes[0] == "layer" else s
    said = ("one layer's", "gathered") if moved(lay, "step", "live", s) else ("one layer's",)
    live = part(lay, "live", one, place, x.dtype, n, ", ".join(said[one is s :]))
    live = live._replace(copies=live.copies // lay.stages) if one is not s else live  # other stages have other layers
    return rest, step, live, part(lay, "grad", run, place, "float32", n)


def activations(x: Shapes, seq: int, place: Mapping[str, int]) -> tuple[Held, ...]:
    """The activations of one micro-batch. Those of axes that the model has not are left out."""
    lay, length = x.layout, padded(x.layout, seq)
    sizes = {name: whole for s in x.leaves.values() for name, whole in zip(s.axes, s.shape)}
    sizes |= {"batch": x.rows * lay.size(lay.batch), "seq": length, "whole_seq": length}
    found = []
    sizes |= {inside: sizes[outside] for inside, outside in INSIDE.items()}
    if "expert" in sizes:
        sizes["assigned"] = assigned(x, seq, lay.size(split(lay, "assigned")))
    plain = {inside: outside for inside, outside in INSIDE.items() if split(lay, inside) == split(lay, outside)}
    for name, (axes, dtype) in ACTIVATIONS.items():
        if all(axis in sizes for axis in axes.split()) and not ("attend_heads" in axes and "attend_heads" in plain):
            s = spec(sizes, " ".join(plain.get(axis, axis) for axis in axes.split()))
            one = _activation(x, s, place, dtype or x.dtype)
            if lay.stages > 1 and name != "tokens" and not any(PIPE in cut.over for cut in one.cuts):
                one = one._replace(
                    copies=one.copies // lay.stages, note="on each stage of another micro-batch" * (name == "residual stream")
                )
            if name == "tokens" and lay.ring:
                one = one._replace(note=f"places {spans(held_places(lay, one.cuts[-1]))}")
            if name == "inside the experts" and not x.config.capacity:
                one = one._replace(note="in even shares")
            found.append(Held((name,), tuple(cut.name for cut in one.cuts), s.shape, (one,)))
    return tuple(found)


def assigned(x: Shapes, seq: int, parts: int) -> int:
    """Tokens of a micro-batch that one expert has room for; without a capacity, its even share of them.  parts: that have to be alike."""
    c, rows = x.config, x.rows * x.layout.size(x.layout.batch)
    many = rows * seq * c.top * (c.capacity or 1) / c.experts
    return math.ceil(many / parts) * parts


def held_places(lay: Layout, seq: Cut) -> list[int]:
    """The places in its row of the tokens that a device holds, where a ring orders them.  seq: the device's cut of the sequence."""
    count = seq.size // seq.parts
    return sorted(int(n) for n in true_place(lay, seq.own * count + np.arange(count), seq.size))


def _activation(x: Shapes, s: Spec, place: Mapping[str, int], dtype: str) -> Part:
    """One activation; of logits only one chunk exists at a time."""
    whole = part(x.layout, "acts", s, place, dtype)
    if s.axes[-1] != "vocab":
        return whole
    tokens, rows = math.prod(whole.shape[:-1]), whole.shape[-1]
    chunks = min(chunk_count(tokens, rows, x.layout.platform), tokens)
    here = math.ceil(tokens / chunks) * rows * 4
    return whole._replace(bytes=here, note=f"one of {chunks} chunks at a time" if chunks > 1 else "")


def labels(paths: tuple[str, ...]) -> list[str]:
    """Paths for people, those of one parent on one line: "attn: q, o"."""
    found: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.removeprefix("layers.").rpartition(".")
        found.setdefault(parent, []).append(name)
    return [(f"{parent}: " if parent else "") + ", ".join(names) for parent, names in found.items()]


def visible(parts: int, own: int, most: int = 8) -> list[int | None]:
    """Which of so many pieces are drawn: all where there are few, else the first, the device's own and the last, with None for what lies between."""
    if parts <= most:
        return list(range(parts))
    shown = sorted({*range(max(1, most // 2)), own, parts - 1})
    found: list[int | None] = []
    for before, now in zip([-1, *shown], shown):
        found += [None, now] if now > before + 1 else [now]
    return found


def shown(d: Drawing, axis: str) -> list[int | None]:
    """Which places along a mesh axis are drawn: all of a small mesh."""
    most = d.sizes[axis] if d.devices <= MOST else {1: 8, 2: 5, 3: 3}.get(len(d.sizes), 2)
    return visible(d.sizes[axis], d.place[axis], most)


def holders(d: Drawing, split: tuple[Cut, ...], pieces: Mapping[str, int]) -> list[int]:
    """The devices that hold one piece of an array.  pieces: axis -> its piece, for the axes that matter."""
    found = []
    for device in range(d.devices):
        place = coordinates(d.sizes, device)
        if all(pieces.get(cut.name, own) == own for cut in split for own in [piece(d.sizes, cut.over, place)]):
            found.append(device)
    return found


def spans(numbers: list[int]) -> str:
    """Device numbers for people: [0, 1, 2, 3, 6] -> "0-3 6"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)
