"""A folder is whole or not there."""

import errno
import subprocess
from pathlib import Path

import pytest

from meshloom.weights.folder import check_free, check_model, whole_folder


def test_it_appears_when_the_block_ends(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "a" / "b") as new:
        (new / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "file").read_text() == "x"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_nothing_is_left_of_a_failure_and_the_old_one_stays(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "a", overwrite=True) as new:
        (new / "file").touch()
        raise RuntimeError
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "old"]


def test_files_are_overwritten_only_if_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with whole_folder(tmp_path / "a") as new:
        (new / "one").touch()
    with pytest.raises(FileExistsError, match="exists already"), whole_folder(tmp_path / "a"):
        pass
    with whole_folder(tmp_path / "a", overwrite=True) as new:
        (new / "two").touch()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["two"]


def test_a_full_disk_is_reported_with_the_folder_and_the_free_bytes(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left: could not write .*a \(\d+ bytes free") as error, whole_folder(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left")
    assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


@pytest.mark.parametrize("held", ["run.yaml", "checkpoints"])
def test_a_run_is_never_overwritten(tmp_path: Path, held: str) -> None:
    (tmp_path / held).touch()
    with pytest.raises(FileExistsError, match="is the folder of a run: overwriting would remove its checkpoints. Choose another folder"):
        check_free(tmp_path, overwrite=True)
    assert (tmp_path / held).exists()


def test_only_a_model_is_overwritten_where_the_user_names_it(tmp_path: Path) -> None:
    check_model(tmp_path / "new")
    (tmp_path / "thesis.txt").touch()
    for target in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(FileExistsError, match="holds something else than a model, so it is not overwritten"):
            check_model(target)
    (tmp_path / "config.json").touch()
    check_model(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "hf").touch()
    with whole_folder(tmp_path / "hf", overwrite=True) as new:
        (new / "file").touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["hf", "file"]


@pytest.mark.parametrize("whole", [True, False], ids=["before it took its place", "after"])
def test_what_a_killed_process_left_is_put_right(tmp_path: Path, whole: bool) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f".a.new-{gone.pid}", f".a.old-{gone.pid}", *(["a"] if whole else [])):
        (tmp_path / name).mkdir()
        (tmp_path / name / name.strip(".")[:5]).touch()
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "a", overwrite=True):
        raise RuntimeError
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["a", "a/a" if whole else "a/a.old"]
