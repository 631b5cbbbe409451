"""Texts know where they stand; colours do not collide; files are SVG or PNG."""

from pathlib import Path

import pytest

from meshloom.plan.page import FONTS, box, check, colours, page, text, width, words, write


def test_colours_are_the_same_in_every_picture_and_differ_in_one() -> None:
    many = ("data", "zero1", "zero3", "rows", "cols", "context", "tensor")
    assert len(set(colours(many).values())) == len(many)
    assert colours(("zero1", "zero3", "tensor"))["tensor"] == colours(("tensor",))["tensor"]
    assert colours(("data", "tensor"))["tensor"] == colours(("tensor",))["tensor"] == colours(("zero3", "tensor"))["tensor"]


def test_a_text_is_made_to_fit() -> None:
    p = page({})
    assert text(p, 10, 10, "a rather long sentence", room=40) <= 50.1
    end = words(p, 100, 50, [("red", "#ff0000"), ("blue", "#0000ff")], at="center")
    left, right = p.texts[1], p.texts[2]
    assert left.right < right.left and right.right == pytest.approx(end) and (left.left + right.right) / 2 == pytest.approx(100)
    assert width("wide", 20) == pytest.approx(2 * width("wide", 10), rel=0.02)


def test_turned_words_go_up() -> None:
    p = page({})
    words(p, 10, 100, [("first", "#000000"), ("second", "#000000")], at="center", turned=True)
    first, second = p.texts
    assert first.top > second.bottom and (first.bottom + second.top) / 2 == pytest.approx(100)


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
def test_writes(tmp_path: Path, name: str) -> None:
    p = page({})
    text(p, 10, 10, "a $dollar$ & <more>")
    box(p, 10, 20, 30, 30, name="here")
    write(p, 100, tmp_path / name)
    raw = (tmp_path / name).read_bytes()
    if name.endswith("png"):
        assert raw.startswith(b"\x89PNG")
    else:
        said = raw.decode()
        assert 'id="here"' in said and "a $dollar$ &amp; &lt;more&gt;" in said and FONTS["'DejaVu Sans'"] in said
        write(p, 100, tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == raw, "the same picture is the same file"


@pytest.mark.parametrize(
    "name, said", [("a.jpg", "a.jpg ends in '.jpg', and a picture is written as .svg or .png. Name it a.svg."), ("a", "Name it a.svg")]
)
def test_refuses_another_file(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        check(Path(name))
