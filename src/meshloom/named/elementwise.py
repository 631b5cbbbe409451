"""Operations element by element: any function of jnp, and Python's operators. Axes meet by name. Nothing moves but sums that were owed."""

import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.named.tensor import Tensor, aligned, named, placed, same_place, scoped

FUNCTIONS = {
    name: getattr(jnp, name)
    for name in "exp log log1p expm1 sqrt square abs sign sin cos tanh floor ceil round isfinite isnan logical_not "
    "maximum minimum power equal not_equal logical_and logical_or where clip".split()
} | {name: getattr(jax.nn, name) for name in "relu gelu silu sigmoid softplus".split()} | {"rsqrt": jax.lax.rsqrt, "stop_gradient": jax.lax.stop_gradient}  # fmt: skip
"""Functions that `meshloom` has under these names; any other goes through `map`."""


def map(fn: Callable, *xs, **settings) -> Tensor:
    """fn, a function of arrays that works element by element, of tensors: `ml.map(jnp.arctan2, y, x)`. A tensor that lacks an axis is the same all
    along it. The result's axes are those of the first, then what the others add.  settings: handed on to fn.
    Raises ValueError where fn is not elementwise, sizes differ, or the rules forbid the result."""
    what = f"ml.map of {getattr(fn, '__name__', 'a function')}"
    ts = [named(x, what) for x in xs]
    with scoped(getattr(fn, "__name__", "map"), *ts):
        names, arrays, place = aligned(ts, what)
        y = fn(*arrays, **settings)
    if jnp.shape(y) != np.broadcast_shapes(*(np.shape(x) for x in arrays)):
        raise ValueError(
            f"{what}: it turned {[np.shape(x) for x in arrays]} into {jnp.shape(y)}, so it is not elementwise. Use another operation."
        )
    return Tensor(names, y, place)


def of(name: str) -> Callable:
    """The row `name` of FUNCTIONS as a function of tensors."""
    fn = FUNCTIONS[name]

    def call(*xs, **settings) -> Tensor:
        return map(fn, *xs, **settings)

    call.__name__, call.__doc__ = name, f"`{name}` of JAX, element by element, on tensors that meet by name."
    return call


def astype(x, dtype) -> Tensor:
    """x with elements of another type."""
    return map(lambda a: jnp.asarray(a).astype(dtype), x)


def _linear(fn: Callable) -> Callable:
    """The sum or difference of two tensors. Two parts of sums over the same mesh axes give a part of one sum: one all-reduce later, not two."""

    def call(a, b) -> Tensor:
        a, b = named(a, fn.__name__), named(b, fn.__name__)
        place = same_place([a, b])
        if (
            not a.pending
            or a.pending != b.pending
            or a.gathers
            or b.gathers
            or place is None
            or a.pending & place.split((*a.names, *b.names))
        ):
            return map(fn, a, b)
        parts = [Tensor(t.names, t.part, t.place) for t in (a, b)]
        names, arrays, place = aligned(parts, fn.__name__)
        return Tensor(names, fn(*arrays), place, a.pending, owed=f"{a.owed}, {b.owed}" if a.owed != b.owed else a.owed)

    return call


def _scaling(fn: Callable) -> Callable:
    """A product or quotient. What is a part of a sum and is scaled by one number stays a part of a sum."""

    def call(a, b) -> Tensor:
        a, b = named(a, fn.__name__), named(b, fn.__name__)
        for t, number in ((a, b), *([(b, a)] if fn is operator.mul else [])):
            if t.pending and not number.names and not number.pending:
                number = placed(number, t.place)
                return Tensor(t.names, fn(t.part, number.value()), t.place, t.pending, t.gathers, t.owed)
        return map(fn, a, b)

    return call


def _reflected(fn: Callable) -> Callable:
    return lambda self, other: fn(other, self)


add, sub, mul, div = _linear(operator.add), _linear(operator.sub), _scaling(operator.mul), _scaling(operator.truediv)
BINARY = {
    "add": add, "sub": sub, "mul": mul, "truediv": div,
    **{name: (lambda fn: lambda a, b: map(fn, a, b))(getattr(operator, name)) for name in ("pow", "floordiv", "mod", "and_", "or_", "xor")},
}  # fmt: skip
COMPARE = {name: (lambda fn: lambda a, b: map(fn, a, b))(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")}

for _name, _fn in BINARY.items():
    setattr(Tensor, f"__{_name.strip('_')}__", _fn)
    setattr(Tensor, f"__r{_name.strip('_')}__", _reflected(_fn))
for _name, _fn in COMPARE.items():
    setattr(Tensor, f"__{_name}__", _fn)
Tensor.__neg__ = lambda self: mul(self, -1)  # type: ignore[attr-defined]
Tensor.__invert__ = lambda self: map(operator.invert, self)  # type: ignore[attr-defined]
Tensor.__abs__ = lambda self: map(jnp.abs, self)  # type: ignore[attr-defined]
