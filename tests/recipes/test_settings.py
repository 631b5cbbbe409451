"""The page of settings is what the code says."""

from pathlib import Path

from meshloom.core.config import keys
from meshloom.models.table import MODELS
from meshloom.recipes import settings
from meshloom.recipes.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings.page(), "Run: make docs"


def test_the_page_names_every_key_and_family() -> None:
    page = settings.page()
    for key in keys(RunConfig):
        assert f"| `{key}` |" in page
    for name, model in MODELS.items():
        assert f"## model, family {name}" in page
        for key in keys(model.Config):
            assert f"| `{key}` |" in page


def test_every_setting_says_what_it_is() -> None:
    blank = [line for line in settings.page().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert not blank
