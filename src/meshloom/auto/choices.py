"""How each primitive may be split: its loop over letters, as an einsum's.

An operation runs over letters; each axis of an operand or a result is a letter, or is kept whole. A strategy sends mesh axes to letters: operands and
results that have the letter are split, and where no result has it, what each device computes is a part of a sum."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

WHOLE = -1
"""An axis that cannot be split here."""


class Letters(NamedTuple):
    """An operation's letters.  ins, outs: the letter of every axis of every operand and result, or WHOLE.  sizes: of a letter, what its split has
    to divide.  summed: letters without which a result is a part of a sum.  flops: of the whole operation; two for a multiplication with its
    addition.  heavy: whether strategies are chosen here, or the operation follows its operand."""

    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    summed: tuple[int, ...] = ()
    flops: float = 0.0
    heavy: bool = False


def letters(eqn: Any) -> tuple[Letters, bool]:
    """The letters of an equation, and whether there is a row for its primitive. Without one all its operands and results are kept whole."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        return whole(eqn), False
    return rule(eqn), True


def whole(eqn: Any) -> Letters:
    """Nothing split."""
    ins, outs = (tuple((WHOLE,) * len(_shape(v)) for v in vs) for vs in (eqn.invars, eqn.outvars))
    return Letters(ins, outs, (), heavy=True)


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def elementwise(eqn: Any) -> Letters:
    """Every axis is a letter; an operand's axes of size 1 are broadcast."""
    shape = _shape(eqn.outvars[0])
    n = len(shape)
    ins = tuple(tuple(i if s == shape[i] else WHOLE for i, s in enumerate(_shape(v))) for v in eqn.invars)
    return Letters(ins, (tuple(range(n)),) * len(eqn.outvars), shape)


def except_axes(*names: str) -> Callable[[Any], Letters]:
    """Operands and results have the same axes in the same order; those that a parameter names, and those whose size changes, are kept whole."""

    def rule(eqn: Any) -> Letters:
        kept = {a for name in names for a in _many(eqn.params[name])}
        shapes = [_shape(v) for v in (*eqn.invars, *eqn.outvars)]
        rank = max(len(s) for s in shapes)
        full = [s for s in shapes if len(s) == rank]
        free = [all(s[i] == full[0][i] for s in full) and i not in kept for i in range(rank)]
        one = lambda s: tuple(i if free[i] else WHOLE for i in range(rank)) if len(s) == rank else (WHOLE,) * len(s)
        return Letters(tuple(one(_shape(v)) for v in eqn.invars), tuple(one(_shape(v)) for v in eqn.outvars), full[0])

    return rule


def _many(said: Any) -> tuple[int, ...]:
    return tuple(said) if isinstance(said, (tuple, list)) else (said,)


def last(eqn: Any) -> Letters:
    """top_k: all axes but the one that it looks along."""
    axis = eqn.params.get("axis", -1) % len(_shape(eqn.invars[0]))
    one = lambda v: tuple(i if i != axis else WHOLE for i in range(len(_shape(v))))
    return Letters(tuple(map(one, eqn.invars)), tuple(map(one, eqn.outvars)), _shape(eqn.invars[0]))


def reduction(splits: bool) -> Callable[[Any], Letters]:
    """Some axes are summed up.  splits: whether they may be split (a sum's may, an argmax's are kept whole)."""

    def rule(eqn: Any) -> Letters:
        axes, shape = _many(eqn.params["axes"]), _shape(eqn.invars[0])
        ins = tuple(WHOLE if i in axes and not splits else i for i in range(len(shape)))
        outs = tuple(i for i in range(len(shape)) if i not in axes)
        return Letters((ins,) * len(eqn.invars), (outs,) * len(eqn.outvars), shape, tuple(axes) if splits else ())

    return rule


def dot(eqn: Any) -> Letters:
    """dot_general: batch, summed, the left's own and the right's own axes."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left, right = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    a = list(range(len(left)))
    b: list[int] = [WHOLE] * len(right)
    for i, j in [*zip(lb, rb), *zip(lc, rc)]:
        b[j] = i
    sizes = list(left)
    for j, size in enumerate(right):
        if b[j] == WHOLE:
            b[j] = len(sizes)
            sizes.append(size)
    own = lambda axes, used: [axes[i] for i in range(len(axes)) if i not in used]
    out = (*(a[i] for i in lb), *own(a, {*lc, *lb}), *own(b, {*rc, *rb}))
    return Letters((tuple(a), tuple(b)), (out,), tuple(sizes), tuple(lc), 2.0 * math.prod(sizes), True)


def ragged(eqn: Any) -> Letters:
    """ragged_dot_general: rows in groups are kept whole; the summed axis and the right's own are letters."""
    ins, outs = (tuple((WHOLE,) * len(_shape(v)) for v in vs) for vs in (eqn.invars, eqn.outvars))
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), _ = numbers.dot_dimension_numbers
    left, right, out = _shape(eqn.invars[0]), _shape(eqn.invars[1]), _shape(eqn.outvars[0])
    flops = 2.0 * math.prod(left) * right[-1]
    if len(left) != 2 or len(right) != 3 or len(out) != 2 or tuple(lc) != (1,) or tuple(rc) != (1,):
        return Letters(ins, outs, (), flops=flops, heavy=True)  # the gradient of the weights: sums inside groups
    return Letters(((WHOLE, 0), (WHOLE, 0, 1), (WHOLE,)), ((WHOLE, 1),), (left[1], right[2]), (0,), flops, True)


def convolution(eqn: Any) -> Letters:
    """Batch, and features in and out where these are not in groups."""
    numbers, p = eqn.params["dimension_numbers"], eqn.params
    left, right, out = _shape(eqn.invars[0]), _shape(eqn.invars[1]), _shape(eqn.outvars[0])
    a, b, c = [WHOLE] * len(left), [WHOLE] * len(right), [WHOLE] * len(out)
    sizes, summed = (left[numbers.lhs_spec[0]], right[numbers.rhs_spec[0]], right[numbers.rhs_spec[1]]), ()
    if p["batch_group_count"] == 1:
        a[numbers.lhs_spec[0]] = c[numbers.out_spec[0]] = 0
        if p["feature_group_count"] == 1:
            b[numbers.rhs_spec[0]] = c[numbers.out_spec[1]] = 1
            a[numbers.lhs_spec[1]] = b[numbers.rhs_spec[1]] = 2
            summed = (2,)
    flops = 2.0 * math.prod(out) * math.prod(right) / right[numbers.rhs_spec[0]]
    return Letters((tuple(a), tuple(b)), (tuple(c),), sizes, summed, flops, True)


def broadcast(eqn: Any) -> Letters:
    """The operand's axes are letters, the new ones too."""
    shape, given = _shape(eqn.outvars[0]), _shape(eqn.invars[0])
    where = eqn.params["broadcast_dimensions"]
    ins = tuple(d if given[i] == shape[d] else WHOLE for i, d in enumerate(where))
    return Letters((ins, *(() for _ in eqn.invars[1:])), (tuple(range(len(shape))),), shape)


def transpose(eqn: Any) -> Letters:
    """Axes in another order."""
    given = _shape(eqn.invars[0])
    return Letters((tuple(range(len(given))),), (tuple(eqn.params["permutation"]),), given)


def reshape(eqn: Any) -> Letters:
    """Axes that become one, or that one becomes: the outermost is a letter, which the smaller of both has to be divisible for."""
    given, shape = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    ins, outs, sizes = [WHOLE] * len(given), [WHOLE] * len(shape), []
    i = j = 0
    while i < len(given) and j < len(shape):
        m, n, first = given[i], shape[j], (i, j)
        i, j = i + 1, j + 1
        while m != n:
            if m < n and i < len(given):
                m, i = m * given[i], i + 1
            elif j < len(shape):
                n, j = n * shape[j], j + 1
            else:
                break
        a, b = (next((k for k in range(lo, hi) if s[k] > 1), lo) for lo, hi, s in ((first[0], i, given), (first[1], j, shape)))
        ins[a] = outs[b] = len(sizes)
        sizes.append(math.gcd(given[a], shape[b]))
    return Letters((tuple(ins), *(() for _ in eqn.invars[1:])), (tuple(outs),), tuple(sizes))


def squeeze(eqn: Any) -> Letters:
    """Axes of size 1 are taken away."""
    given = _shape(eqn.invars[0])
    gone = {d % len(given) for d in eqn.params["dimensions"]}
    return Letters((tuple(range(len(given))),), (tuple(i for i in range(len(given)) if i not in gone),), given)


def stack(eqn: Any) -> Letters:
    """Arrays along a new axis, or apart again (unstack): all axes but that one."""
    axis, rank = eqn.params["axis"], len(_shape(eqn.invars[0]))
    joins = eqn.primitive.name == "stack"
    few, many = (eqn.invars, eqn.outvars) if joins else (eqn.outvars, eqn.invars)
    wide = rank + joins
    long = tuple(WHOLE if i == axis % wide else i for i in range(wide))
    short = tuple(i for i in long if i != WHOLE)
    ins, outs = ((short,) * len(few), (long,)) if joins else ((long,), (short,) * len(few))
    return Letters(ins, outs, _shape(many[0]))


def tile(eqn: Any) -> Letters:
    """Copies beside each other: axes of which there is one copy."""
    one = tuple(i if n == 1 else WHOLE for i, n in enumerate(eqn.params["reps"]))
    return Letters((one,), (one,), _shape(eqn.invars[0]))


def fourier(eqn: Any) -> Letters:
    """fft: all axes but the last ones, which it works along."""
    shape, kept = _shape(eqn.invars[0]), len(_shape(eqn.invars[0])) - len(eqn.params["fft_lengths"])
    one = tuple(i if i < kept else WHOLE for i in range(len(shape)))
    return Letters((one,), (one,), shape)


def gather(eqn: Any) -> Letters:
    """Rows by their number: batch axes, axes that are taken in full, and the looked-up axis, whose devices each find a part (zeros elsewhere)."""
    n = eqn.params["dimension_numbers"]
    table, out, taken = _shape(eqn.invars[0]), _shape(eqn.outvars[0]), eqn.params["slice_sizes"]
    ins, outs, sizes, summed = [WHOLE] * len(table), [WHOLE] * len(out), [], []
    kept = [d for d in range(len(table)) if d not in n.collapsed_slice_dims and d not in n.operand_batching_dims]
    for d, o in zip(kept, n.offset_dims):
        if taken[d] == table[d]:
            ins[d] = outs[o] = _new(sizes, table[d])
    numbers = [WHOLE] * len(_shape(eqn.invars[1]))
    for i, o in enumerate(o for o in range(len(out)) if o not in n.offset_dims):
        numbers[i] = outs[o] = _new(sizes, out[o])
    for d, i in zip(n.operand_batching_dims, n.start_indices_batching_dims):
        ins[d] = numbers[i]
    for d in n.collapsed_slice_dims:
        ins[d] = _new(sizes, table[d])
        summed.append(ins[d])
    return Letters((tuple(ins), tuple(numbers)), (tuple(outs),), tuple(sizes), tuple(summed), heavy=True)


def scatter(adds: bool) -> Callable[[Any], Letters]:
    """Rows added to, or put into, a table by their number.  adds: whether parts of the updates may be added up on different devices."""

    def rule(eqn: Any) -> Letters:
        n = eqn.params["dimension_numbers"]
        table, updates = _shape(eqn.invars[0]), _shape(eqn.invars[2])
        ins, ups, sizes, summed = [WHOLE] * len(table), [WHOLE] * len(updates), [], []
        kept = [d for d in range(len(table)) if d not in n.inserted_window_dims and d not in n.operand_batching_dims]
        for d, u in zip(kept, n.update_window_dims):
            if updates[u] == table[d]:
                ins[d] = ups[u] = _new(sizes, table[d])
        numbers = [WHOLE] * len(_shape(eqn.invars[1]))
        batched = dict(zip(n.scatter_indices_batching_dims, n.operand_batching_dims))
        for i, u in enumerate(u for u in range(len(updates)) if u not in n.update_window_dims):
            if i in batched or adds:
                numbers[i] = ups[u] = _new(sizes, updates[u])
            if i in batched:
                ins[batched[i]] = numbers[i]
            elif adds:
                summed.append(numbers[i])
        for d in n.inserted_window_dims:
            ins[d] = _new(sizes, table[d])
        return Letters((tuple(ins), tuple(numbers), tuple(ups)), (tuple(ins),), tuple(sizes), tuple(summed), heavy=True)

    return rule


def _new(sizes: list[int], size: int) -> int:
    sizes.append(size)
    return len(sizes) - 1


ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex
conj convert_element_type copy copy_p cos cosh device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg nextafter not or polygamma population_count
pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta sharding_constraint reshard pvary""".split()

RULES: dict[str, Callable[[Any], Letters]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor".split(), reduction(True)),
    **dict.fromkeys("argmax argmin".split(), reduction(False)),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp split".split(), except_axes("axis")),
    "sort": except_axes("dimension"),
    "concatenate": except_axes("dimension"),
    "rev": except_axes("dimensions"),
    "top_k": last,
    **dict.fromkeys("slice pad dynamic_slice dynamic_update_slice".split(), except_axes()),
    **dict.fromkeys("reduce_window_sum reduce_window_max reduce_window_min reduce_window select_and_scatter_add".split(), except_axes()),
    "dot_general": dot,
    "ragged_dot_general": ragged,
    "conv_general_dilated": convolution,
    "broadcast_in_dim": broadcast,
    "transpose": transpose,
    "reshape": reshape,
    "squeeze": squeeze,
    "stack": stack,
    "unstack": stack,
    "tile": tile,
    "fft": fourier,
    "gather": gather,
    "scatter-add": scatter(True),
    "scatter": scatter(False),
}
"""Primitive -> its letters."""
