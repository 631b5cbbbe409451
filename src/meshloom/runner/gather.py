"""Weights from where they rest to where a step needs them; training and generation both start here."""

from dataclasses import replace

import jax

from meshloom.core.compress import GATHERED, Blocks, bits, gather, quantize
from meshloom.core.layout import Layout
from meshloom.core.leaf import live, parts
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree
from meshloom.core.vary import vary
from meshloom.runner.place import Place, to_stage


def gather_step(lay: Layout, specs: Tree, params: Tree, dtype: str, where: Place | None = None) -> tuple[Tree, Tree]:
    """The weights that a step differentiates, as table `grad` splits them, and the step's own copies where it holds more of them (ZeRO-2; None
    elsewhere). Each is gathered over the mesh axes that the next table lacks, so the outer stage of two moves the smaller pieces. Copies that layers
    will gather in blocks are cut into these here, once a step.

    where: of a pipeline's layers; each stage then has its own.
    Cast to the type of the arithmetic before anything is exchanged or gathered; marked as varying over the mesh axes on which they work on parts (the batch's
    and `core.leaf.parts`), so that gradients stay local sums until the end of the step.
    """

    def one(s: Spec, p: jax.Array) -> tuple[jax.Array, jax.Array | Blocks | None]:
        p = vary(p, (*lay.tokens, *parts(lay, s.axes)))
        dim, axes = lay.gathered("rest", "grad", s.axes)
        p = gather(p, axes, dim, bits(lay, GATHERED, axes, s.axes, s.exact))
        dim, axes = lay.gathered("grad", "step", s.axes)
        whole = gather(p, axes, dim, bits(lay, GATHERED, axes, s.axes, s.exact))
        _, later = lay.gathered("step", "live", s.axes)
        if width := bits(lay, GATHERED, later, s.axes, s.exact):
            return p, quantize(whole.reshape(*whole.shape[: s.axes[0] == "layer"], -1), width)
        return p, whole if axes else None

    params = jax.tree.map(lambda s, p: p if s.exact else p.astype(dtype), specs, params, is_leaf=is_spec)
    params = to_stage(lay, where, specs, params) if where else params
    pairs = jax.tree.map(one, specs, params, is_leaf=is_spec)
    pick = [jax.tree.map(lambda s, pair, i=i: pair[i], specs, pairs, is_leaf=is_spec) for i in (0, 1)]
    return pick[0], pick[1]


def outer_weights(specs: Tree, lay: Layout, w: Tree, whole: Tree, when: jax.Array) -> Tree:
    """The live weights outside the layers.  specs: of the whole model.  w, whole: without its layers.  when: as for `core.leaf.live`."""
    return jax.tree.map(lambda s, a, b: live(lay, s.axes, a, b, when), outside(specs), w, whole, is_leaf=is_spec)


def outside(tree: Tree) -> Tree:
    """The model without its layers."""
    return replace(tree, layers=None)
