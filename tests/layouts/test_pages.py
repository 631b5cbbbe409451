"""The pages on layouts say what the code computes."""

import re

import pytest

from layouts.pages import FOLDER, MARK, PAGES, fresh
from meshloom.parallel.table import STRATEGIES


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_are_those_of_the_code(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert MARK.search(text), "a page on a strategy shows its tables"
    assert fresh(text) == text, "run `PYTHONPATH=src:tests python -m layouts.pages`"


def test_every_strategy_has_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"`{name}`" in text or f"`{name}=" in text for name in STRATEGIES)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_tests_exist(page) -> None:
    for path in re.findall(r"`((?:tests|src)/[\w/.]+)`", page.read_text(encoding="utf-8")):
        assert (FOLDER.parents[1] / path).exists(), path
