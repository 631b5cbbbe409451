"""YAML as a person means it."""

import math
from pathlib import Path

import pytest

from meshloom.core import yamls

MEANT = {
    "1e-3": 1e-3, "1e4": 10_000, "1.0": 1.0, "3": 3, "1_000": 1000, "-2": -2, ".5": 0.5, "1.5e3": 1500.0, "no": "no", "on": "on", "yes": "yes",
    "true": True, "null": None, "": None, "1:30": "1:30", "2024-01-01": "2024-01-01", "zero3=4 tensor=2": "zero3=4 tensor=2", "[1, 2e-1]": [1, 0.2],
    "{a: {b: 1}}": {"a": {"b": 1}}, "'1'": "1", "0x10": "0x10",
}  # fmt: skip


@pytest.mark.parametrize("spelled", MEANT)
def test_values_mean_what_they_look_like(spelled: str) -> None:
    value = yamls.value(spelled)
    assert value == MEANT[spelled] and type(value) is type(MEANT[spelled])


@pytest.mark.parametrize(
    "value", [1e-05, 1e22, 0.1, 1.0, math.inf, "1e-3", "no", "null", "", "~", "1_0", "a: b", "true", "é", [1, [2]], {"a": []}, None, True]
)
def test_what_is_written_reads_back_equal(value: object) -> None:
    again = yamls.value(yamls.text({"k": value}))["k"]
    assert again == value and type(again) is type(value)


def test_a_key_given_twice_is_refused(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("train:\n  steps: 1\n  steps: 2\n")
    with pytest.raises(ValueError, match=r"a\.yaml is not YAML: line 3, column 3: the key 'steps' is given twice"):
        yamls.read(tmp_path / "a.yaml")


def test_files_that_hold_no_mapping_are_refused(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold keys and values"):
        yamls.read(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        yamls.read(tmp_path / "b.yaml")


def test_a_key_that_is_no_word_and_an_empty_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1, column 3: a key must be a word, not a list or a section"):
        yamls.value("? [a, b]\n: 3\n")
    (tmp_path / "a.yaml").write_text("# nothing\n")
    with pytest.raises(ValueError, match="it is empty"):
        yamls.read(tmp_path / "a.yaml")
