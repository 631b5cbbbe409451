"""One program under several layouts against one device and NumPy: results, gradients, and the collectives that explain says; shared by the tests."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import meshloom as ml
from meshloom.named.rules import layout
from meshloom.named.tensor import Tensor, is_tensor
from meshloom.plan.hlo import collectives, total

MESH = "rows=2 cols=4"
RNG = np.random.default_rng(0)


def floats(names: str, *shape: int) -> Tensor:
    """A tensor of normal deviates."""
    return ml.tensor(names, RNG.normal(size=shape).astype(np.float32))


def whole(names: str, below: int, *shape: int) -> Tensor:
    """A tensor of whole numbers from -1 to `below`, so that some are outside an axis of that size."""
    return ml.tensor(names, RNG.integers(-1, below + 1, size=shape).astype(np.int32))


def leaves(out) -> list[np.ndarray]:
    """The arrays of a result, axes in alphabetical order, so that the order of names does not matter."""
    found = jax.tree.leaves(out, is_leaf=is_tensor)
    return [np.asarray(o.array(" ".join(sorted(o.names))) if is_tensor(o) else o) for o in found]


def with_grads(fn: Callable, args: tuple) -> Callable:
    """fn's result and the gradient of a number that depends on every floating part of it, not linearly, as one program."""
    at = tuple(i for i, a in enumerate(args) if all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(a)))
    if not any(jnp.issubdtype(o.dtype, jnp.floating) for o in jax.tree.leaves(fn(*args), is_leaf=is_tensor)):
        return fn

    def number(*xs):
        out = fn(*xs)
        floats = [o for o in jax.tree.leaves(out, is_leaf=is_tensor) if jnp.issubdtype(o.dtype, jnp.floating)]
        return sum((ml.sum(ml.sin(ml.where(ml.isfinite(o), o, 0))) for o in floats), 0.0).array(), out

    return jax.grad(number, at, has_aux=True)


def held(fn: Callable, args: tuple, *rules: str, mesh: str = MESH) -> list[ml.explain]:
    """Holds a program under each rules against itself on one device, and its counts against the compiled program.  Returns the explanations."""
    both = with_grads(fn, args)
    one, told = leaves(both(*args)), []
    for rule in rules:
        program = ml.program(both, mesh, rule)
        compiled = program.lower(*args).compile()
        for got, want in zip(leaves(compiled(*program.place(args))), one, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=rule)
        said = ml.explain(program, *args)
        assert said.total == total(collectives(compiled.as_text(), layout(mesh).sizes)), rule
        told.append(ml.explain(fn, *args, mesh=mesh, rules=rule))
    return told
