"""Tensors with named axes: what they are, how they meet, and when the sums and gathers that they still owe are done."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from meshloom.core.config import unknown
from meshloom.core.spec import Init, Spec
from meshloom.core.spec import init as core_init
from meshloom.core.spec import spec as core_spec
from meshloom.core.vary import vary, varying
from meshloom.named import move
from meshloom.named.rules import Place

Number = int | float | complex | bool | jax.Array | np.ndarray | np.generic


class Tensor:
    """An array whose axes have names. Operations match axes by name; the order of names never changes a result.

    Outside a program it holds the whole array. Inside one, `place` says how names are split, and `part` is this device's part, which may still owe
    work that is done when it is first needed: `pending` are mesh axes over which it is a part of a sum, `gathers` are axes still to be made whole.
    Such debts, and being marked as varying, are kept once done, so what uses a tensor twice pays once, in its gradient too. `owed` is the operation that they come from.
    """

    __array_priority__ = 1000  # numpy hands `array * tensor` to us
    __slots__ = ("_done", "gathers", "names", "owed", "part", "pending", "place")

    def __init__(
        self, names, part, place: Place | None = None, pending: frozenset[str] = frozenset(), gathers: tuple = (), owed: str = ""
    ) -> None:
        self.names, self.part, self.place, self.pending, self.gathers, self.owed = tuple(names), part, place, pending, gathers, owed
        self._done: dict = {}
        if place is not None:
            place.check(self.names)

    @property
    def sizes(self) -> dict[str, int]:
        """Name -> size of the whole tensor."""
        extra = {dim: self.place.layout.size(axes) for dim, axes in self.gathers} if self.place else {}
        parts = [self.place.parts(name) if self.place else 1 for name in self.names]
        return {name: n * parts[i] * extra.get(i, 1) for i, (name, n) in enumerate(zip(self.names, np.shape(self.part)))}

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        return jnp.result_type(self.part)

    @property
    def spec(self) -> Spec:
        """The tensor without its values."""
        return core_spec(self.sizes, " ".join(self.names), dtype=str(self.dtype))

    @property
    def split(self) -> frozenset[str]:
        """Mesh axes that split this tensor."""
        return self.place.split(self.names) if self.place else frozenset()

    def value(self, over: frozenset[str] = frozenset()) -> jax.Array:
        """This device's part, nothing owed, marked as varying at least over the mesh axes `over`."""
        t = self.added_up()
        if not t.gathers and (not over or over <= varying(t.part)):
            return t.part

        def make() -> jax.Array:
            with _owed(t):
                whole = move.gathered(t.part, t.gathers, over)
            return vary(whole, over)

        return t.once(("value", over), make)

    def added_up(self) -> "Tensor":
        """The same tensor with its partial sums added up."""
        if not self.pending:
            return self

        def make() -> Tensor:
            with _owed(self):
                return Tensor(self.names, move.add_up(self.part, self.pending), self.place, gathers=self.gathers, owed=self.owed)

        return self.once("sum", make)

    def gathered_up(self) -> "Tensor":
        """The same tensor with no axis still to be made whole; its sums are added up first, where there is one."""
        return Tensor(self.names, self.value(), self.place) if self.gathers else self

    def array(self, names: str = "") -> jax.Array:
        """The plain array with its axes in the order given: `t.array("batch hidden")`. A tensor without names needs none.
        Raises ValueError where the names are not the tensor's, and inside a program, where this is one device's part, if any is split."""
        order = tuple(names.split())
        if sorted(order) != sorted(self.names):
            raise ValueError(
                f"This tensor has the axes '{' '.join(self.names)}', and '{names}' was asked for. Give all of them, in your order."
            )
        if self.split:
            raise ValueError(
                f"Inside a laid-out program a tensor ({' '.join(self.names)}) is one device's part, and '{names}' of it is no whole array. "
                "Return it from the program and take its array there."
            )
        return jnp.transpose(self.value(), [self.names.index(name) for name in order])

    def item(self) -> float:
        """The number that a tensor without names is."""
        return self.array().item()

    def once(self, what, make: Callable) -> Any:
        """What `make` returns, made once within one tracing of JAX."""
        now = get_opaque_trace_state(convention="flax")
        known = self._done.setdefault(what, [])
        for when, made in known:
            if when == now:
                return made
        known[:] = [*known[-1:], (now, make())]  # two at most, so that a constant does not keep every program that used it
        return known[-1][1]

    def __repr__(self) -> str:
        try:
            sizes = " ".join(f"{name}={n}" for name, n in self.sizes.items())
        except (TypeError, AttributeError):
            return f"Tensor({' '.join(self.names)}: {self.part})"
        return f"Tensor({sizes or 'one number'}: {self.dtype})"

    def __bool__(self) -> bool:
        if self.names:
            raise ValueError(f"A tensor with axes ({' '.join(self.names)}) is neither true nor false. Use ml.where, or reduce it first.")
        return bool(self.value())

    def __hash__(self) -> int:
        return id(self)


OWED = "owed by "


def _owed(t: Tensor):
    """A scope that tells whose work is done late."""
    return jax.named_scope(OWED + t.owed) if t.owed else contextlib.nullcontext()


def _flat(t: Tensor):
    return (t.value(),), (t.names, t.place)


def _unflat(aux, children) -> Tensor:
    names, place = aux
    t = object.__new__(Tensor)  # children may be anything that JAX maps over, so nothing is checked
    t.names, t.place, t.part, t.pending, t.gathers, t.owed, t._done = names, place, children[0], frozenset(), (), "", {}
    return t


jax.tree_util.register_pytree_with_keys(
    Tensor, lambda t: (((jax.tree_util.GetAttrKey("part"), t.value()),), (t.names, t.place)), _unflat, _flat
)


def words(names: str) -> tuple[str, ...]:
    """The names of a spelling, "batch hidden". Raises ValueError where one stands twice."""
    found = tuple(names.split())
    for name in found:
        if found.count(name) > 1:
            raise ValueError(
                f"'{name}' stands twice in '{names}'. Axes of one tensor have different names; call one of them '{name}_2', say."
            )
    return found


def tensor(names: str, values: Any) -> Tensor:
    """A tensor with these axis names, in the order of the array's axes: `ml.tensor("batch hidden", values)`.
    Raises ValueError where there are not as many names as axes."""
    found, values = words(names), values if isinstance(values, jax.ShapeDtypeStruct) else jnp.asarray(values)
    if len(found) != len(values.shape):
        raise ValueError(f"An array of shape {tuple(values.shape)} has {len(values.shape)} axes, and '{names}' names {len(found)}.")
    return Tensor(found, values)


def spec(names: str, std: float = 0.0, mean: float = 0.0, dtype: str = "float32", **sizes: int) -> Spec:
    """A tensor not yet made: `ml.spec("embed ffn", embed=64, ffn=256, std=0.02)`. `ml.explain` takes specs in place of tensors, `ml.init` makes
    them.  std, mean: how it starts.  Raises ValueError for names without a size and sizes without a name."""
    found = words(names)
    for name in (*found, *sizes):
        if name not in sizes or name not in found:
            raise ValueError(f"'{names}' with sizes for {', '.join(sizes) or 'nothing'}: '{name}' needs to be in both.")
    return core_spec(sizes, names, Init(std, mean), dtype)


def init(specs: Any, key: jax.Array) -> Any:
    """Tensors for a tree of specs. A tensor's numbers depend on the key and its path alone."""
    arrays = core_init(specs, key)
    return jax.tree.map(lambda s, x: Tensor(s.axes, x), specs, arrays, is_leaf=lambda x: isinstance(x, Spec))


def is_tensor(x: Any) -> bool:
    """Whether x is a Tensor: the `is_leaf` of maps over named tensors."""
    return isinstance(x, Tensor)


def named(x: Any, what: str) -> Tensor:
    """x as a tensor; numbers have no names. Raises ValueError for arrays, whose axes nobody named."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Number):
        if np.ndim(x):
            raise ValueError(
                f"{what} was given an array of shape {np.shape(x)} without names. Name its axes: ml.tensor('batch hidden', values)."
            )
        return Tensor((), x)
    raise ValueError(f"{what} was given a {type(x).__name__}. It takes tensors (ml.tensor) and numbers.")


def has(t: Tensor, name: str, what: str) -> int:
    """Where a name stands in a tensor. Raises ValueError with the nearest name if it does not."""
    if name not in t.names:
        raise ValueError(f"{what}: {unknown('axis in this tensor,', name, t.names)}")
    return t.names.index(name)


def same_place(ts: list[Tensor]) -> Place | None:
    """The place of the tensors that have one."""
    places = [t.place for t in ts if t.place is not None]
    if any(p != places[0] for p in places):
        raise ValueError("Tensors of two programs with different layouts meet. Pass one of them to the other program as an argument.")
    return places[0] if places else None


def placed(t: Tensor, place: Place | None) -> Tensor:
    """A whole tensor as part of a program: each device keeps its part. One that has its place is returned as it is."""
    if place is None or t.place is not None:
        return t

    def make() -> Tensor:
        place.check(t.names, tuple(t.sizes.values()))
        part = t.part
        for dim, name in enumerate(t.names):
            part = move.own(place.layout, part, dim, place.axes(name))
        return Tensor(t.names, part, place)

    return t.once(("placed", place), make)


def check_sizes(ts: list[Tensor], what: str) -> dict[str, int]:
    """The size of every name of the tensors. Raises ValueError where two differ."""
    sizes: dict[str, int] = {}
    for t in ts:
        for name, n in t.sizes.items():
            if sizes.setdefault(name, n) != n:
                raise ValueError(
                    f"{what}: '{name}' has size {sizes[name]} in one tensor and {n} in another. Axes of one name are of one size."
                )
    return sizes


def over(ts: list[Tensor]) -> frozenset[str]:
    """Mesh axes over which any of the tensors varies."""
    return frozenset().union(*(varying(t.added_up().part) - {a for _, axes in t.gathers for a in axes} for t in ts))


def aligned(ts: list[Tensor], what: str) -> tuple[tuple[str, ...], list[jax.Array], Place | None]:
    """All names of the tensors in order of appearance, their parts with those axes (of size 1 where a tensor lacks one), and their place."""
    check_sizes(ts, what)
    place = same_place(ts)
    ts = [placed(t, place) for t in ts]
    names = tuple(dict.fromkeys(name for t in ts for name in t.names))
    if place is not None:
        place.check(names)
    marks = over(ts)

    def one(t: Tensor) -> jax.Array:
        if not t.names and not isinstance(t.part, jax.Array):
            return t.part  # a Python number keeps its weak type
        x = jnp.transpose(t.value(marks), [t.names.index(name) for name in names if name in t.names])
        return jnp.expand_dims(x, [i for i, name in enumerate(names) if name not in t.names])

    return names, [one(t) for t in ts], place


def said(what: str, *ts: Tensor, out: tuple[str, ...] | None = None) -> str:
    """An operation as `ml.explain` calls it: "einsum batch hidden, hidden out -> batch out"."""
    text = f"{what} {', '.join(' '.join(t.names) or 'one number' for t in ts)}"
    return text if out is None else f"{text} -> {' '.join(out) or 'one number'}"


@contextlib.contextmanager
def scoped(what: str, *ts: Tensor, out: tuple[str, ...] | None = None):
    """A scope that gives the operations inside it their name in `ml.explain`, and returns it."""
    text = said(what, *ts, out=out)
    with jax.named_scope(text):
        yield text


def sized(names: tuple[str, ...], sizes: Mapping[str, int], what: str) -> tuple[int, ...]:
    """The sizes of names. Raises ValueError for a name without one."""
    for name in names:
        if name not in sizes:
            raise ValueError(f"{what}: '{name}' has no size. Give one: {name}=8.")
    return tuple(sizes[name] for name in names)
