"""Names and shapes: rename, split, merge, slice, pad, concat, shift, cumsum. What moves follows from comparing the layouts before and after."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshloom.named import move
from meshloom.named.rules import Place
from meshloom.named.tensor import Tensor, check_sizes, has, named, over, placed, said, same_place, scoped, sized, words

HIDDEN = "'"
"""Ends the name of an axis that is whole for the length of one operation; rules cannot name it."""


def relaid(t: Tensor, names: tuple[str, ...], have: Any = None, part: Any = None, owed: str = "") -> Tensor:
    """t with other names for its axes, moved to where the rules put them. have: how its axes are split now; part: the array, if not t's own."""
    if t.place is None:
        return Tensor(names, t.part if part is None else part)
    place, owed = t.place, owed or t.owed or said("move", t, out=names)
    place.check(names)
    if have is None:
        t = t.gathered_up()
        have, part = [place.axes(name) for name in t.names], t.part
    want = [place.axes(name) for name in names]
    sizes = [n * place.layout.size(h) for n, h in zip(part.shape, have)]
    place.check(names, tuple(sizes))
    part, gathers, pending = move.relayout(place.layout, part, have, want, t.pending)
    return Tensor(names, part, place, pending, gathers, owed)


def rename(x: Tensor, **names: str) -> Tensor:
    """x with some axes called otherwise: `ml.rename(x, seq="key_seq")`. Where the rules split the new name otherwise, x moves: by all-to-all,
    reduce-scatter (of a sum still owed) or all-gather; onto more mesh axes, nothing moves."""
    x = named(x, "ml.rename")
    for name in names:
        has(x, name, "ml.rename")
    after = words(" ".join(names.get(name, name) for name in x.names))

    def make() -> Tensor:
        with scoped("rename", x, out=after) as text:
            return relaid(x, after, owed=x.owed or text)

    return x.once(("rename", after), make)


def whole(x: Tensor, name: str) -> Tensor:
    """x with one axis made whole, under a name that only we use."""
    return x.once(("whole", name), lambda: relaid(x, tuple(n + HIDDEN if n == name else n for n in x.names)))


def _held(t: Tensor, name: str) -> bool:
    """Whether an axis is split."""
    return t.place is not None and bool(t.place.axes(name))


def split(x: Tensor, name: str, to: str, **sizes: int) -> Tensor:
    """One axis as several, the outermost first: `ml.split(x, "model", "heads head", heads=8)`; one size may be left out.
    Raises ValueError for sizes that do not multiply to the axis."""
    x, after = named(x, "ml.split"), words(to)
    at, total = has(x, name, "ml.split"), x.sizes[name]
    free = [n for n in after if n not in sizes]
    known = math.prod(sizes.get(n, 1) for n in after)
    if len(free) == 1 and known and total % known == 0:
        sizes = {**sizes, free[0]: total // known}
    shape = sized(after, sizes, "ml.split")
    if math.prod(shape) != total:
        raise ValueError(f"ml.split: '{name}' of size {total} is not {' x '.join(f'{n}={sizes[n]}' for n in after)}. Change a size.")
    names = words(" ".join((*x.names[:at], *after, *x.names[at + 1 :])))
    with scoped("split", x, out=names):
        if x.place is None:
            return Tensor(names, jnp.reshape(x.part, (*x.part.shape[:at], *shape, *x.part.shape[at + 1 :])))
        place = x.place
        fit = _fit(place, place.axes(name), shape)
        x = (x if fit is not None else whole(x, name)).gathered_up()
        part = x.part
        fit = fit if fit is not None else [()] * len(shape)
        local = [n // place.layout.size(axes) for n, axes in zip(shape, fit)]
        part = jnp.reshape(part, (*part.shape[:at], *local, *part.shape[at + 1 :]))
        others = [place.axes(n) for n in x.names]
        return relaid(x, names, [*others[:at], *fit, *others[at + 1 :]], part)


def _fit(place: Place, axes: tuple[str, ...], shape: tuple[int, ...]) -> list[tuple[str, ...]] | None:
    """How the axes of `shape` are split when the one axis that they make is split by `axes`; None where parts would straddle them."""
    fit: list[tuple[str, ...]] = [() for _ in shape]
    left = list(axes)
    for i, n in enumerate(shape):
        while left and n % place.layout.size((left[0],)) == 0:
            n //= place.layout.size((left[0],))
            fit[i] += (left.pop(0),)
        if left and n != 1:
            return None
    return None if left else fit


def merge(x: Tensor, names: str, to: str) -> Tensor:
    """Several axes as one, the outermost first: `ml.merge(x, "heads head", to="model")`. Its place is that of the first of them."""
    x, group = named(x, "ml.merge"), words(names)
    for name in group:
        has(x, name, "ml.merge")
    first = x.names.index(group[0])
    rest = [n for n in x.names if n not in group]
    at = len([n for n in x.names[:first] if n not in group])
    order = (*rest[:at], *group, *rest[at:])
    after = words(" ".join((*rest[:at], to, *rest[at:])))
    with scoped("merge", x, out=after):
        x = x.gathered_up()
        x = Tensor(order, jnp.transpose(x.part, [x.names.index(n) for n in order]), x.place, x.pending, owed=x.owed)
        sizes = x.sizes
        if x.place is None:
            return Tensor(after, jnp.reshape(x.part, (*x.part.shape[:at], -1, *x.part.shape[at + len(group) :])))
        place = x.place
        fit = _fit(place, place.axes(to), tuple(sizes[n] for n in group))
        fit = fit if fit is not None else [()] * len(group)
        have = [place.axes(n) for n in x.names]
        want = [*have[:at], *fit, *have[at + len(group) :]]
        part, gathers, pending = move.relayout(place.layout, x.part, have, want, x.pending)
        part = move.gathered(part, gathers, frozenset())
        part = jnp.reshape(part, (*part.shape[:at], -1, *part.shape[at + len(group) :]))
        now = [*want[:at], tuple(a for axes in fit for a in axes), *want[at + len(group) :]]
        return relaid(Tensor(after, part, place, pending, owed=x.owed), after, now, part)


def _along(x: Tensor, name: str, what: str, fn) -> Tensor:
    """fn (array, axis number) -> array, along an axis that it needs whole: gathered first and split again after, where the rules split it."""
    at = has(x, name, what)
    with scoped(what.removeprefix("ml."), x):
        if not _held(x, name):
            x = x.gathered_up()
            return Tensor(x.names, fn(x.part, at), x.place, x.pending, owed=x.owed)
        y = whole(x, name).gathered_up()
        part = fn(y.part, at)
        return relaid(Tensor(y.names, part, y.place, y.pending, owed=y.owed), x.names)


def slice(x: Tensor, name: str, start: int, stop: int) -> Tensor:
    """The elements start to stop (not itself) along an axis, which keeps its name. A split axis is gathered for it, and split again.
    Raises ValueError where they are not inside the axis."""
    x = named(x, "ml.slice")
    has(x, name, "ml.slice")
    if not 0 <= start < stop <= x.sizes[name]:
        raise ValueError(f"ml.slice: {start} to {stop} is not within '{name}' of size {x.sizes[name]}, or holds nothing.")
    return _along(x, name, "ml.slice", lambda a, at: lax.slice_in_dim(a, start, stop, axis=at))


def pad(x: Tensor, name: str, before: int = 0, after: int = 0, value: float = 0) -> Tensor:
    """x with elements of one value added at the ends of an axis. A split axis is gathered for it, and split again."""
    x = named(x, "ml.pad").added_up()
    if before < 0 or after < 0:
        raise ValueError(f"ml.pad: {before} before and {after} after '{name}': neither may be negative. ml.slice takes elements away.")
    return _along(
        x, name, "ml.pad", lambda a, at: jnp.pad(a, [(before, after) if i == at else (0, 0) for i in range(a.ndim)], constant_values=value)
    )


def concat(xs: list[Tensor], name: str) -> Tensor:
    """Tensors one after the other along an axis; they agree in all other sizes. A split axis is gathered for it, and split again."""
    ts = [named(x, "ml.concat") for x in xs]
    for t in ts:
        has(t, name, "ml.concat")
        if set(t.names) != set(ts[0].names):
            raise ValueError(
                f"ml.concat: one tensor has axes ({' '.join(ts[0].names)}), another ({' '.join(t.names)}). They need the same."
            )
    check_sizes(
        [Tensor([n for n in t.names if n != name], jnp.zeros([s for n, s in t.sizes.items() if n != name])) for t in ts], "ml.concat"
    )
    place = same_place(ts)
    with scoped("concat", *ts):
        ts = [placed(t, place).added_up() for t in ts]
        wide = [whole(t, name) if _held(t, name) else t for t in ts]
        names, marks = wide[0].names, over(wide)
        arrays = [jnp.transpose(t.value(marks), [t.names.index(n) for n in names]) for t in wide]
        return relaid(Tensor(names, jnp.concatenate(arrays, names.index(wide[0].names[has(ts[0], name, "")])), place), ts[0].names)


def shift(x: Tensor, name: str, steps: int, wrap: bool = False) -> Tensor:
    """x moved on along an axis: element i is what was element i - steps. What comes in is zero, or with `wrap` what left at the other end.
    Along a split axis only what crosses a border moves, by collective-permute."""
    x = named(x, "ml.shift")
    at, size = has(x, name, "ml.shift"), x.sizes[name]
    with scoped("shift", x):
        x = x.gathered_up()
        if _held(x, name):
            part = move.shifted(x.place.layout, x.part, at, x.place.axes(name), steps, wrap)  # type: ignore[union-attr]
        elif wrap:
            part = jnp.roll(x.part, steps, at)
        else:
            keep = max(size - abs(steps), 0)
            from_ = max(-steps, 0) if keep else 0
            kept = lax.slice_in_dim(x.part, from_, from_ + keep, axis=at)
            widths = (min(steps, size), 0) if steps > 0 else (0, min(-steps, size))
            part = jnp.pad(kept, [widths if i == at else (0, 0) for i in range(x.part.ndim)])
        return Tensor(x.names, part, x.place, x.pending, owed=x.owed)


def cumsum(x: Tensor, name: str) -> Tensor:
    """Running sums along an axis. Along a split one each device sums its part, and the totals of all parts are gathered."""
    x = named(x, "ml.cumsum").added_up()
    at = has(x, name, "ml.cumsum")
    with scoped("cumsum", x):
        part = x.value()
        sums = jnp.cumsum(part, axis=at)
        if _held(x, name):
            total = lax.slice_in_dim(sums, sums.shape[at] - 1, None, axis=at)
            sums = sums + move.before(x.place.layout, total, x.place.axes(name))  # type: ignore[union-attr]
        return Tensor(x.names, sums, x.place)
