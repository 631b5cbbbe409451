"""The pictures of the pages say what the code says today."""

import html
import importlib.util
import re
from pathlib import Path

import pytest

from meshloom.plan import timeline
from meshloom.plan.picture import compose

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def script():
    """docs/pictures/draw.py as a module."""
    spec = importlib.util.spec_from_file_location("pictures_draw", FOLDER / "draw.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAW = script()


@pytest.mark.parametrize("name", [*DRAW.LAYOUTS, *DRAW.SCHEDULES])
def test_pictures_are_those_of_the_code(name: str) -> None:
    page, _ = timeline.compose(DRAW.SCHEDULES[name]) if name in DRAW.SCHEDULES else compose(DRAW.layout(name))
    shown = [html.unescape(said) for said in re.findall(r"<text[^>]*>(.*?)</text>", (FOLDER / f"{name}.svg").read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(text.text for text in page.texts), "run `make pictures`"


@pytest.mark.parametrize("name", [*DRAW.LAYOUTS, *DRAW.SCHEDULES])
def test_pictures_are_shown_on_a_page(name: str) -> None:
    pages = [FOLDER.parents[1] / "README.md", *FOLDER.parent.rglob("*.md")]
    assert any(f"pictures/{name}.svg" in page.read_text(encoding="utf-8") for page in pages)
