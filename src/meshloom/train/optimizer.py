"""Optimizers: Optax transformations over a tree of named-axis parameters.

What a parameter is follows from its axis names alone. Leave out `layer` (a stack of layers is many weights, not one bigger one) and call
the rest by what they carry: `heads`, `kv_heads` and `head` together are one thing, attention's width. A parameter that joins two such
things is a *matrix*: q [layer, embed, heads, head] joins embed with attention's width; an embedding [vocab, embed] is a matrix too. Norm
gains [layer, embed] and biases [layer, heads, head] are not. Weight decay, Muon and Adafactor's factoring apply to matrices, layer by layer.

The state mirrors the parameters by path: `state_specs` names its axes, so that whatever places the parameters places the state as well.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from meshloom.core.spec import ZEROS, Spec, abstract, is_spec, trained
from meshloom.core.tree import Tree, named_leaves
from meshloom.train.config import OptimizerConfig
from meshloom.train.scale import select

WIDTHS = dict.fromkeys(("heads", "kv_heads", "head", "key_value", "value"), "attention")
"""Axes that together are one side of a matrix; every other axis is a side of its own."""
STACKS = ("layer", "expert", "replica")
"""Axes along which separate weights are stacked."""
TABLES_BY_INDEX = ("vocab", "position")
"""A matrix with one of these is looked up row by row (or is the head that mirrors such a table): Muon leaves it to Adam."""


class Role(NamedTuple):
    """What a parameter is. `own`: positions of its axes without the stack's. `rows`, `columns`: the two sides of a matrix, else empty.
    `table`: looked up by index. `count`: elements of one weight of the stack, without padding."""

    own: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    table: bool
    count: int

    @property
    def matrix(self) -> bool:
        """Whether the parameter joins two sides."""
        return bool(self.rows)


def role(s: Spec) -> Role:
    """What one parameter is, by the names of its axes: a matrix's rows are the side that comes first, its columns the rest."""
    side = [WIDTHS.get(name, name) for name in s.axes]
    own = tuple(i for i, name in enumerate(s.axes) if name not in STACKS)
    rows = tuple(i for i in own if side[i] == side[own[0]])
    columns = tuple(i for i in own if i not in rows)
    table, count = any(s.axes[i] in TABLES_BY_INDEX for i in own), math.prod(s.used[i] for i in own)
    return Role(own, rows if columns else (), columns, table, count)


def roles(specs: Tree) -> Tree:
    """The Role of every parameter, in the parameters' structure."""
    return jax.tree.map(role, specs, is_leaf=is_spec)


def decayed(specs: Tree) -> tuple[str, ...]:
    """The dotted paths of the parameters that weight decay shrinks: the matrices that train."""
    return tuple(name for name, s in named_leaves(specs, is_spec).items() if role(s).matrix and not s.frozen)


# ---- directions: gradient -> direction of descent, before the learning rate and weight decay ----
#
# Each update takes `finite` and leaves the state bit for bit where it is False. Adam selects before it divides, not after: then the parameters
# depend on the selected moments alone and XLA updates all three in place (selecting the finished state costs 1.2x of the whole update on a CPU).


def skipping(direction: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Any Optax direction, with a state that stays bit for bit where `finite` is False."""

    def update(grads: Tree, state: Tree, params: Tree, *, finite: ArrayLike = True, **_: Any) -> tuple[Tree, Tree]:
        towards, new = direction.update(grads, state, params)
        return towards, select(finite, new, state)

    return optax.GradientTransformationExtraArgs(direction.init, update)


class Moments(NamedTuple):
    """Adam's state, and Muon's: nu is None where a parameter has no second moment."""

    count: Array
    mu: Tree
    nu: Tree


def _is_role(x: Any) -> bool:
    return isinstance(x, Role)


def _unzip(tree: Tree, like: Tree, n: int) -> tuple[Tree, ...]:
    """A tree of n-tuples as n trees; `like` tells where the tuples are."""
    leaves = jax.tree.structure(like).flatten_up_to(tree)
    return tuple(jax.tree.unflatten(jax.tree.structure(like), [leaf[i] for leaf in leaves]) for i in range(n))


def _next(count: Array, finite: ArrayLike) -> tuple[Array, Array]:
    """The count of steps that count, and the same as fp32 for powers."""
    count = count + jnp.asarray(finite, jnp.int32)
    return count, jnp.maximum(count, 1).astype(jnp.float32)


def _adam_leaf(c: OptimizerConfig, t: Array, finite: ArrayLike, g: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
    """Adam's direction of one parameter at step t (from 1), and both moments. Multiplies by the corrections, which are scalars, where the
    textbook divides every element."""
    m = jnp.where(finite, c.beta1 * m + (1 - c.beta1) * g, m)
    v = jnp.where(finite, c.beta2 * v + (1 - c.beta2) * jnp.square(g), v)
    return m * (1 / (1 - c.beta1**t)) / (jnp.sqrt(v * (1 / (1 - c.beta2**t))) + c.eps), m, v


def adam(c: OptimizerConfig, roles: Tree) -> optax.GradientTransformationExtraArgs:
    """Adam's direction.  Source: arXiv 1412.6980, algorithm 1 (with decoupled decay: arXiv 1711.05101)."""

    def init(params: Tree) -> Moments:
        return Moments(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Tree, state: Moments, params: Tree = None, *, finite: ArrayLike = True, **_: Any) -> tuple[Tree, Moments]:
        count, t = _next(state.count, finite)
        out = jax.tree.map(partial(_adam_leaf, c, t, finite), grads, state.mu, state.nu)
        direction, mu, nu = _unzip(out, grads, 3)
        return direction, Moments(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration. Source: Keller Jordan 2024, 'Muon: an optimizer for hidden layers'."""


def orthogonalize(x: Array, r: Role, steps: int = 5, eps: float = 1e-8) -> Array:
    """Each layer's matrix with its singular values pushed towards 1.  x: any axes, of which r names the two sides; returns the same shape."""
    stack = tuple(i for i in range(x.ndim) if i not in r.own)
    order = stack + r.rows + r.columns
    moved = x.transpose(order)
    sides = [math.prod(x.shape[i] for i in side) for side in (stack, r.rows, r.columns)]
    flat = moved.reshape(sides)
    wide = flat if sides[1] <= sides[2] else flat.swapaxes(1, 2)
    wide = wide / (jnp.linalg.norm(wide, axis=(1, 2), keepdims=True) + eps)
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = wide @ wide.swapaxes(1, 2)
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    flat = wide if sides[1] <= sides[2] else wide.swapaxes(1, 2)
    return flat.reshape(moved.shape).transpose([order.index(i) for i in range(x.ndim)])


def muon(c: OptimizerConfig, roles: Tree) -> optax.GradientTransformationExtraArgs:
    """Muon's direction for the matrices of the layers, Adam's for the rest (tables, gains, biases).
    Scaled to a root mean square of c.rms, so that one learning rate serves both.  Source: arXiv 2502.16982, equation 4."""

    def by_muon(r: Role) -> bool:
        return r.matrix and not r.table

    def init(params: Tree) -> Moments:
        nu = jax.tree.map(lambda r, p: None if by_muon(r) else jnp.zeros_like(p), roles, params, is_leaf=_is_role)
        return Moments(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), nu)

    def leaf(r: Role, g: Array, m: Array, v: Array | None, t: Array, finite: ArrayLike) -> tuple:
        if not by_muon(r):
            return _adam_leaf(c, t, finite, g, m, v)
        beta = c.momentum
        m = jnp.where(finite, beta * m + (1 - beta) * g, m)
        ahead = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t) if c.nesterov else m
        longer = max(math.prod(g.shape[i] for i in side) for side in (r.rows, r.columns))
        return orthogonalize(ahead, r) * (math.sqrt(longer) * c.rms), m, None

    def update(grads: Tree, state: Moments, params: Tree = None, *, finite: ArrayLike = True, **_: Any) -> tuple[Tree, Moments]:
        count, t = _next(state.count, finite)
        out = jax.tree.map(lambda r, *leaves: leaf(r, *leaves, t, finite), roles, grads, state.mu, state.nu, is_leaf=_is_role)
        direction, mu, nu = _unzip(out, grads, 3)
        return direction, Moments(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


class Factored(NamedTuple):
    """Adafactor's state: a matrix's second moment as its means over the columns (`rows`) and over the rows (`columns`); else in full (`nu`)."""

    count: Array
    rows: Tree
    columns: Tree
    nu: Tree


def adafactor(c: OptimizerConfig, roles: Tree) -> optax.GradientTransformationExtraArgs:
    """Adafactor's direction, each layer's matrix factored along its two sides.  Optax factors the two longest axes of the array, which in a
    stack of layers may be the stack, and clips the stack as one.  Source: arXiv 1804.04235, algorithms 4 and 5, without momentum."""

    def init(params: Tree) -> Factored:
        def slot(pick: Callable[[Role], tuple[int, ...] | None]) -> Tree:
            def zeros(r: Role, p: Array) -> Array | None:
                gone = pick(r)
                return None if gone is None else jnp.zeros([n for i, n in enumerate(p.shape) if i not in gone], p.dtype)

            return jax.tree.map(zeros, roles, params, is_leaf=_is_role)

        count = jnp.zeros((), jnp.int32)
        rows, columns = slot(lambda r: r.columns if r.matrix else None), slot(lambda r: r.rows if r.matrix else None)
        return Factored(count, rows, columns, slot(lambda r: None if r.matrix else ()))

    def leaf(r: Role, g: Array, row: Array, column: Array, v: Array, p: Array, keep: Array) -> tuple:
        square = jnp.square(g) + 1e-30
        if r.matrix:
            row = keep * row + (1 - keep) * square.mean(r.columns)
            column = keep * column + (1 - keep) * square.mean(r.rows)
            tall, wide = jnp.expand_dims(row, r.columns), jnp.expand_dims(column, r.rows)
            direction = g * jax.lax.rsqrt(tall / tall.mean(r.rows, keepdims=True)) * jax.lax.rsqrt(wide)
        else:
            v = keep * v + (1 - keep) * square
            direction = g * jax.lax.rsqrt(v)
        direction = direction / jnp.maximum(1, _rms(direction, r) / c.update_clip)
        if c.relative:
            direction = direction * jnp.maximum(_rms(p, r), 1e-3)
        return direction, row, column, v

    def update(grads: Tree, state: Factored, params: Tree) -> tuple[Tree, Factored]:
        count = state.count + 1
        keep = 1 - count.astype(jnp.float32) ** -c.decay_rate
        trees = (grads, state.rows, state.columns, state.nu, params)
        out = jax.tree.map(lambda r, *leaves: leaf(r, *leaves, keep), roles, *trees, is_leaf=_is_role)
        direction, rows, columns, nu = _unzip(out, grads, 4)
        return direction, Factored(count, rows, columns, nu)

    return skipping(optax.GradientTransformation(init, update))


def _rms(x: Array, r: Role) -> Array:
    """Root mean square of each weight of a stack, kept as axes of size 1; padding, which is zero, is not counted."""
    return jnp.sqrt(jnp.square(x).sum(r.own, keepdims=True) / r.count)


def lion(c: OptimizerConfig, roles: Tree) -> optax.GradientTransformationExtraArgs:
    """Lion's direction: the sign of a mean.  Source: arXiv 2302.06675, algorithm 2."""
    return skipping(optax.scale_by_lion(c.beta1, c.beta2))


def sgd(c: OptimizerConfig, roles: Tree) -> optax.GradientTransformationExtraArgs:
    """The gradient, with momentum where it is not 0."""
    return skipping(optax.trace(c.momentum, c.nesterov) if c.momentum else optax.identity())


OPTIMIZERS = {"adamw": adam, "adafactor": adafactor, "lion": lion, "muon": muon, "sgd": sgd}
"""Kind -> (config, roles) -> direction of descent."""


# ---- the whole optimizer ----


def descend(direction: optax.GradientTransformationExtraArgs, weight_decay: float, mask: Tree) -> optax.GradientTransformationExtraArgs:
    """A direction as an optimizer: update = -lr * (direction + weight_decay * parameter where `mask`).
    Its update takes three further arguments: lr; factor, which multiplies the gradient first (clipping); finite, whether the step counts."""

    def update(
        grads: Tree, state: Tree, params: Tree, *, lr: ArrayLike, factor: ArrayLike = 1.0, finite: ArrayLike = True, **_: Any
    ) -> tuple[Tree, Tree]:
        scaled = jax.tree.map(lambda g: g * factor, grads)
        towards, state = direction.update(scaled, state, params, finite=finite)

        def step(decays: bool, d: Array, p: Array) -> Array:
            return -jnp.asarray(lr) * (d + weight_decay * p if decays and weight_decay else d)

        return jax.tree.map(step, mask, towards, params), state

    return optax.GradientTransformationExtraArgs(direction.init, update)


def make_optimizer(c: OptimizerConfig, specs: Tree) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a model.  specs: the parameters' Specs.  `init(params)`, `update(grads, state, params, lr=, factor=, finite=)`.
    What is frozen has no gradient, no state and no update: None in its place."""
    what = roles(trained(specs, specs))
    mask = jax.tree.map(lambda r: r.matrix, what, is_leaf=_is_role)
    tx = descend(OPTIMIZERS[c.kind](c, what), c.weight_decay, mask)

    def update(grads: Tree, state: Tree, params: Tree, **more: Any) -> tuple[Tree, Tree]:
        return tx.update(grads, state, trained(specs, params), **more)

    return optax.GradientTransformationExtraArgs(lambda params: tx.init(trained(specs, params)), update)


def moved_by(params: Tree, updates: Tree) -> Tree:
    """Parameters plus their updates; themselves, bit for bit, where there is none."""
    return jax.tree.map(lambda p, u: p if u is None else (p + u).astype(p.dtype), params, updates)


def clip_factor(norm: Array, clip: float) -> Array:
    """What the gradient is multiplied by so that its global norm is at most `clip`; 0 never clips.  norm: over all parameters and shards."""
    return jnp.where(norm > clip, clip / norm, 1.0) if clip else jnp.ones_like(norm)


def update(
    tx: optax.GradientTransformationExtraArgs, grads: Tree, norm: Array, state: Tree, params: Tree, *, lr: Array, clip: float
) -> tuple[Tree, Tree, Array]:
    """One step.  norm: the global norm of `grads`, over all shards.  Returns parameters, state, and whether the step counts (bool scalar):
    where the norm is not finite, both come back bit for bit as they were."""
    finite = jnp.isfinite(norm)
    updates, state = tx.update(grads, state, params, lr=lr, factor=clip_factor(norm, clip), finite=finite)
    return select(finite, moved_by(params, updates), params), state, finite


def state_specs(tx: optax.GradientTransformation, specs: Tree) -> Tree:
    """A Spec for every array of the optimizer's state, in the state's structure: map a sharding over it as over the parameters' Specs.

    An array belongs to the parameter whose path ends its own, and has its axes; a factored one (`rows`, `columns`) has those of one side;
    scalars have none.  Raises ValueError for an array of any other shape, with its path: only the optimizer's author can know its axes."""
    state = jax.eval_shape(tx.init, abstract(specs))
    owners = {tuple(path): s for path, s in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)}

    def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> Spec:
        at = next((i for i in range(len(path)) if path[i:] in owners), len(path))
        fields, owner = path[:at], owners.get(path[at:])
        kept = _kept(fields, owner) if owner and leaf.shape else ()
        if leaf.shape != tuple(owner.shape[i] for i in kept) if owner else leaf.shape:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"Optimizer state {name} of shape {leaf.shape} mirrors no parameter, so its sharding is unknown. Give it its axes by hand."
            )
        axes, used = (tuple(values[i] for i in kept) for values in ((owner.axes, owner.used) if owner else ((), ())))
        return Spec(leaf.shape, axes, ZEROS, str(leaf.dtype), used)

    return jax.tree_util.tree_map_with_path(one, state)


GONE = {"rows": lambda r: r.columns, "columns": lambda r: r.rows}
"""Field of a factored state -> the axes that were averaged away."""


def _kept(fields: tuple, owner: Spec) -> tuple[int, ...]:
    """The axes of the parameter that a state array keeps, by the name of the field that holds it."""
    gone = next((GONE[name](role(owner)) for key in fields if (name := getattr(key, "name", "")) in GONE), ())
    return tuple(i for i in range(len(owner.shape)) if i not in gone)
