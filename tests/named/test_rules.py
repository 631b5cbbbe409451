"""Mesh shapes and rules as people write them, and every mistake in them."""

import pytest

import meshloom as ml
from meshloom.core.layout import Layout
from meshloom.named.rules import Place, layout, spelled


def test_reads_text_mappings_and_layouts() -> None:
    said = layout("rows=2 cols=4", "batch:rows hidden:cols ffn:rows,cols")
    assert said == layout({"rows": 2, "cols": 4}, {"batch": "rows", "hidden": ("cols",), "ffn": ("rows", "cols")})
    assert said.acts["ffn"] == ("rows", "cols") and said.devices == 8
    assert layout(said) == said and layout(said, "batch:cols").acts == {"batch": ("cols",)}
    assert spelled(said) == "mesh rows=2 cols=4, rules batch:rows hidden:cols ffn:rows,cols"
    assert spelled(layout("")) == "mesh of one device, rules none"


def test_a_mesh_axis_of_one_device_splits_nothing() -> None:
    assert layout("rows=1 cols=4", "batch:rows hidden:rows,cols").acts == {"hidden": ("cols",)}


@pytest.mark.parametrize(
    "mesh, rules, sentence",
    [
        ("rows=2", "batch:row", "There is no mesh axis 'row'. Did you mean 'rows'?"),
        ("rows=two", "", "'rows=two' is no mesh axis. Write names and numbers"),
        ("rows=0", "", "'rows=0' is no mesh axis"),
        ("rows=2 rows=4", "", "Mesh axis 'rows' is given twice"),
        ("rows=2", "batch", "'batch:' is no rule. Write names and mesh axes: 'batch:rows hidden:cols'"),
        ("rows=2 cols=2", "batch:rows batch:cols", "Two rules split 'batch'. Give it one rule; 'name:rows,cols'"),
        ("rows=2", "batch:rows,rows", "names a mesh axis twice"),
    ],
)
def test_refuses(mesh: str, rules: str, sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        layout(mesh, rules)
    assert sentence in str(told.value)


def test_refuses_two_names_of_one_tensor_on_one_mesh_axis() -> None:
    place = Place(layout("rows=2 cols=4", "batch:rows hidden:cols out:cols"))
    place.check(("batch", "hidden"))
    with pytest.raises(ValueError, match="split both 'hidden' and 'out' over mesh axis 'cols', and one tensor .hidden out. has both"):
        place.check(("hidden", "out"))


def test_refuses_a_size_that_does_not_divide() -> None:
    place = Place(layout("rows=2 cols=4", "batch:rows,cols"))
    with pytest.raises(
        ValueError, match="Axis 'batch' of size 12 cannot be split over 8 devices .mesh axes rows, cols.. Use a size that 8"
    ):
        place.check(("batch",), (12,))


def test_refuses_a_rule_for_a_name_that_no_tensor_has() -> None:
    with pytest.raises(
        ValueError, match="A rule splits 'hiden'. There is no axis of that name in this program: 'hiden'. Did you mean 'hidden'"
    ):
        ml.explain(lambda x: ml.exp(x), ml.spec("batch hidden", batch=2, hidden=4), mesh="rows=2", rules="hiden:rows")


def test_places_are_equal_by_layout() -> None:
    a, b = Place(layout("rows=2", "batch:rows")), Place(layout("rows=2", "batch:rows"), {("batch",)})
    assert a == b and hash(a) == hash(b) and a != Place(Layout({"rows": 2}))


def test_all_legal_tables() -> None:
    """Two names of one tensor, two mesh axes: 9 tables, of which 2 put both names on one mesh axis; 6 does not divide by 4."""
    place = Place(layout("rows=2 cols=4"))
    place.check(("a", "b"), (8, 8))
    found = place.legal()
    assert len(found) == 7 and found[0] == {} and {"a": ("cols",), "b": ("rows",)} in found
    place.check(("a",), (6,))
    assert len(place.legal()) == 5 and not any(table.get("a") == ("cols",) for table in place.legal())
