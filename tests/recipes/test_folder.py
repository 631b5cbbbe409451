"""Folders of runs: a new number for each start, the last one for a resume."""

from pathlib import Path

import pytest

from meshloom.recipes import folder


def test_numbers_go_up_and_the_newest_is_found(tmp_path: Path) -> None:
    assert folder.fresh("a", tmp_path) == tmp_path / "a"
    with pytest.raises(FileNotFoundError, match="There is no run .*a to resume. Start it without --resume"):
        folder.newest("a", tmp_path)
    for made in ("a", "a-2", "a-10", "ab", "a-1", "a-x"):
        (tmp_path / made).mkdir()
    assert folder.fresh("a", tmp_path) == tmp_path / "a-11"
    assert folder.newest("a", tmp_path) == tmp_path / "a-10"
    assert folder.fresh("b", tmp_path / "none") == tmp_path / "none" / "b"
