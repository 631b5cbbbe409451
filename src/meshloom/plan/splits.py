"""How many devices split what, for many meshes of one pattern at once: `core.layout` with arrays in place of numbers, for `bounds.py`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshloom.core.layout import INSIDE
from meshloom.core.spec import Spec
from meshloom.plan.space import BATCH, Pattern, product

Array = np.ndarray
OUTER = {
    "rest": ("zero1", "zero2", "zero3", "rows", "cube_embed", "cube_rows"),
    "grad": ("zero2", "zero3", "rows", "cube_embed", "cube_rows"),
    "step": ("zero3", "rows", "cube_embed", "cube_rows"),
    "live": ("cube_embed",),
}
"""Table -> the mesh axes that split embed in it, but for a pipeline's."""
WIDE = ("heads", "kv_heads", "ffn", "expert_ffn", "vocab")
"""Axes that ways to split the matrices split."""


class Splits:
    """Meshes of one pattern. sizes: mesh axis -> float array [meshes]. For each: batch (devices of the batch), batch_all (also inside layers), whole (of
    whole sequences), wide (of heads, ffn, vocabulary), short (of the residual stream's sequence beside), narrow (of its embed), stages; tokens: of a device in
    a step; most: devices that split any one parameter at most. leaves: the model's parameters that join several axes: all but gains and biases."""

    def __init__(self, q: Any, p: Pattern, sizes: Mapping[str, Array], leaves: list[Spec]) -> None:
        self.q, self.pattern, self.sizes, self.leaves, c = q, p, sizes, leaves, q.config
        self.width, self.ones = jnp.dtype(q.dtype).itemsize, np.ones(len(next(iter(sizes.values()))))
        self.known: dict[tuple[str, ...], Array] = {}
        self.asked: dict[tuple[str, ...], Array] = {}
        self.batch = self.over(*BATCH)
        self.batch_all = self.batch * self.over("cube_embed")
        self.whole = self.over("context", "ulysses")
        self.wide = self.over("tensor", "cols", "cube_heads")
        self.short = self.over("cube_heads") * (self.over("tensor") if "sequence" in p.words else 1)
        self.narrow = self.over("cols", "cube_embed")
        self.stages = self.over("pipe")
        self.tokens = q.sequences * q.seq / (self.batch * self.whole)
        self.keys = np.where(c.kv_heads % self.wide == 0, self.wide, 1.0)
        self.folded = p.options.get("expert") == "folded"
        self.exact, self.streams = False, "stream" in p.options.values()
        self.most = self.over(*OUTER["rest"], "pipe", "expert") * self.wide

    def exactly(self) -> "Splits":
        """The same, whose links are to be asked one by one: for a single mesh."""
        self.exact = True
        return self

    def over(self, *axes: str) -> Array:
        """Devices over these mesh axes."""
        if axes not in self.asked:
            self.asked[axes] = self.ones * product(self.sizes, axes)
        return self.asked[axes]

    def inner(self, axis: str) -> Array:
        """Devices that lie inside one step along a mesh axis."""
        names = list(self.pattern.axes)
        return self.over(*names[names.index(axis) + 1 :]) if axis in self.sizes else self.ones

    def split(self, table: str, *names: str) -> Array:
        """Devices that split a parameter with these axes under a table."""
        key = (table, *names)
        if key not in self.known:
            self.known[key] = self._split(table, *names)
        return self.known[key]

    def _split(self, table: str, *names: str) -> Array:
        out, inside = self.ones, bool(INSIDE & set(names))
        for name in names:
            if name == "embed":
                out = out * self.over(*OUTER[table])
                out = out * self.stages if table == "rest" and inside else out
                out = out * self.over("rows") if table == "live" and inside and self.streams else out
            elif name == "expert":
                out = out * self.over("expert") * (self.wide if self.folded else 1)
            elif name == "kv_heads":
                out = out * self.keys
            elif name in WIDE and not (name == "expert_ffn" and self.folded):
                out = out * self.wide * (self.stages if name == "vocab" else 1)
            elif name == "layer" and table != "rest":
                out = out * self.stages
        return out

    def elements(self, table: str, s: Spec) -> Array:
        """Elements of a parameter on a device under a table, at least."""
        return s.size / self.split(table, *s.axes)

    def bytes(self, table: str, width: int) -> Array:
        """Bytes of all parameters on a device under a table, at least."""
        return sum((self.elements(table, s) * width for s in self.leaves), self.ones * 0)

    def trained(self, table: str, width: int) -> Array:
        """Bytes of the parameters that train on a device under a table, at least."""
        return sum((self.elements(table, s) * width for s in self.leaves if not s.frozen), self.ones * 0)


def own(s: Spec) -> list[str]:
    """A parameter's axes but those that count layers and experts."""
    return [name for name in s.axes if name not in ("layer", "expert")]
