"""Forms of weights that decoding reads faster than those of training: fewer and longer rows.

A product of one row reads its weight once, and does nothing else for long. A CPU does that fastest where the weight is large and its contiguous
axis is the longer one (of one thread's 34 GB/s a product of 512 x 512 gets 16, of 512 x 256 13, of 512 x 2816 22; 1408 x 512 gets 15, turned 19).
So matrices that multiply the same x lie side by side, as one, and those that make little of much are turned.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshloom.core.matmul import contract
from meshloom.core.tree import Tree, pytree

PLATFORMS = {"cpu"}
"""Where this pays; elsewhere weights stay as they are trained."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined:
    """Weights of one x, side by side.  w: [inputs, all their columns].  shapes: the columns of each."""

    w: Any
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    def dots(self, equations: tuple[str, ...], x: jax.Array) -> list[jax.Array]:
        """The product of x with each weight, of "btd,dhk->bthk" the last axes of x that the equation sums over."""
        rows, n = x.shape[:-1], len(self.shapes)
        assert len(equations) == n
        y = contract("btd,df->btf", x, self.w)
        ends = [sum(math.prod(s) for s in self.shapes[:i]) for i in range(1, n)]
        return [part.reshape(*rows, *shape) for part, shape in zip(jnp.split(y, ends, -1), self.shapes)]


@pytree
class Turned:
    """A weight whose summed axes, first as trained, are last, or the reverse."""

    w: Any

    def dot(self, equation: str, x: jax.Array) -> jax.Array:
        """einsum(equation, x, weight as trained): "btf,fd->btd" of [embed, ffn]."""
        operands, out = equation.split("->")
        first, second = operands.split(",")
        rest, summed = ("".join(a for a in second if (a in out) is kept) for kept in (True, False))
        stored = rest + summed if second.startswith(summed) else summed + rest
        return contract(f"{first},{stored}->{out}", x, self.w)


def layer(block: Tree) -> Tree:
    """One layer's weights in the forms that its parts name (`beside`, `last`)."""
    return dataclasses.replace(block, **{f.name: _part(getattr(block, f.name)) for f in dataclasses.fields(block)})


def _part(part: Any) -> Any:
    """An attention's or an MLP's weights: those of the same x as one in the place of the first, the last turned where it makes little of much."""
    changed = {}
    if names := getattr(part, "beside", ()):
        each = [getattr(part, name) for name in names]
        flat = [w.reshape(w.shape[0], -1) for w in each]
        changed = {name: None for name in names} | {names[0]: Joined(jnp.concatenate(flat, 1), tuple(w.shape[1:] for w in each))}
    if name := getattr(part, "last", ""):
        w = getattr(part, name)
        if math.prod(w.shape[:-1]) > w.shape[-1]:
            changed[name] = Turned(jnp.moveaxis(w, -1, 0))
    return dataclasses.replace(part, **changed) if changed else part


def head(w: jax.Array) -> Any:
    """The output head's weight [vocab, embed] as [embed, vocab] where it makes much of little."""
    return Turned(w.T) if w.shape[0] > w.shape[1] else w
