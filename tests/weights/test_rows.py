"""The interpreter of rows: forms both ways, and what does not fit."""

import numpy as np
import pytest

from goldens import small
from meshloom.core.spec import ONES, Spec
from meshloom.models.base import Row
from meshloom.weights.rows import compare, make_map, ours_from, rearrange, theirs_from, turned

SIZES = dict(h=2, n=3, k=4, d=5, i=2, j=2)
FORMS = ["(h k) d -> d h k", "d (h k) -> h k d", "(h n k) d -> n d h k", "d (n h k) -> n d h k", "(h i j) d -> d h (j i)", "d -> d"]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_undone_by_its_turned_form(form: str) -> None:
    count = {"(h k) d": 40, "d (h k)": 40, "(h n k) d": 120, "d (n h k)": 120, "(h i j) d": 40, "d": 5}[form.split(" ->")[0]]
    flat = rearrange(np.arange(count), form.split(" ->")[0].replace("(", "").replace(")", "") + " -> " + form.split(" ->")[0], SIZES)
    assert (rearrange(rearrange(flat, form, SIZES), turned(form), SIZES) == flat).all()


def test_heads_come_out_where_the_form_says() -> None:
    x = np.arange(2 * 4 * 5).reshape(8, 5)
    assert (rearrange(x, "(h k) d -> d h k", SIZES)[:, 1, 2] == x[1 * 4 + 2]).all()
    fused = np.arange(2 * 3 * 4).reshape(24)
    assert (rearrange(fused, "(h n k) -> n h k", SIZES)[1] == [[4, 5, 6, 7], [16, 17, 18, 19]]).all()


def leaf(shape: tuple, axes: tuple, used: tuple | None = None) -> Spec:
    return Spec(shape, axes, ONES, "float32", used or shape)


def test_padding_is_left_out_of_theirs() -> None:
    (place,) = make_map([Row("embed", "wte", "v d -> v d")], {"embed": leaf((8, 5), ("vocab", "embed"), (6, 5))}).places
    assert place.shape == (6, 5)
    assert theirs_from([np.arange(40).reshape(8, 5)], place).shape == (6, 5)


def test_several_of_ours_in_one_of_theirs() -> None:
    specs = {name: leaf((2, 5, 2, 4), ("layer", "embed", "heads", "head")) for name in "qkv"}
    places = make_map([Row(("q", "k", "v"), "h.{layer}.qkv", "(h n k) d -> n d h k")], specs).places
    assert [(p.theirs, p.shape, p.layer) for p in places] == [("h.0.qkv", (24, 5), 0), ("h.1.qkv", (24, 5), 1)]
    parts = [np.random.default_rng(i).normal(size=(5, 2, 4)) for i in range(3)]
    tensor = theirs_from(parts, places[0])
    assert all((ours_from(tensor, places[0], name) == part).all() for name, part in zip("qkv", parts))


def test_a_parameter_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="where b is stored"):
        make_map([Row("a", "a", "d -> d")], {"a": leaf((5,), ("embed",)), "b": leaf((5,), ("embed",))})


def test_everything_that_does_not_fit_is_listed() -> None:
    wanted = make_map([Row(n, n, "d -> d") for n in "abc"] + [Row("", "h.{layer}.mask", "")], {n: leaf((5,), ("embed",)) for n in "abc"})
    fit = {"a": (5,), "b": (5,), "c": (5,), "h.7.mask": (9, 9)}
    assert compare(fit, wanted, "x") == "loaded 3 of 3 tensors, 0 missing, 0 unexpected"
    with pytest.raises(
        ValueError,
        match=r"1 of 3 tensors are there; 2 missing: b, c; 1 that the model does not have: z; 1 of another shape: a is \[6\], not \[5\]",
    ):
        compare({"a": (6,), "z": (1,)}, wanted, "x")


@pytest.mark.parametrize("name", small.names())
def test_the_rows_of_every_family_name_every_parameter_once(name: str) -> None:
    places = small.source(name).map().places
    assert len({p.theirs for p in places}) == len(places)
    assert {p.theirs for p in places} == set(small.source(name).tensors)
