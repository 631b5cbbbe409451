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


def test_the_folder_of_a_run_that_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    (mine / "sub").mkdir(parents=True)
    (mine / "run.yaml").touch()
    assert folder.place(str(mine), "a", True, 1) == mine and folder.place(str(mine), "a", False, 1) == Path("runs/a")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert folder.place("a", "a", True, 1) == Path("runs/a") and folder.place("a", "a", False, 1) == Path("runs/a-2")
    with pytest.raises(ValueError, match="2 processes must agree"):
        folder.place("a", "a", False, 2)
