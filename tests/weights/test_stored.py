"""A checkpoint's folder without its arrays: info, wholeness, damage by name, pickles refused."""

import pytest

from meshloom.core.files import write_json
from meshloom.weights.stored import check_files, list_files, read_info, refuse_pickle, whole


@pytest.fixture
def folder(tmp_path):
    """Step 3 as two processes leave it."""
    path = tmp_path / "3"
    for name in ("manifest", "d/part", "ocdbt.process_0/d/a", "ocdbt.process_1/d/b"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(name.encode() * 100)
    for process in (0, 1):
        write_json(path / f"files.{process}.json", list_files(path, process))
    write_json(path / "info.json", {"format": 1, "step": 3, "processes": 2})
    return path


def test_each_process_lists_its_own(folder):
    assert sorted(list_files(folder, 0)) == ["d/part", "manifest", "ocdbt.process_0/d/a"] and list(list_files(folder, 1)) == [
        "ocdbt.process_1/d/b"
    ]
    check_files(folder)


@pytest.mark.parametrize("missing", ["files.0.json", "files.1.json", "info.json"])
def test_whole_only_with_every_list_and_the_info(folder, missing):
    assert whole(folder)
    (folder / missing).unlink()
    assert not whole(folder)


DAMAGE = {
    "one bit": (
        lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
        "has other contents than were written (CRC-32)",
    ),
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[:100]), "has 100 bytes instead of 600"),
    "lost": (lambda p: p.unlink(), "cannot be read (No such file or directory)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_file_is_named(folder, kind):
    bad = folder / "d" / "part"
    DAMAGE[kind][0](bad)
    with pytest.raises(ValueError) as caught:
        check_files(folder)
    assert f"{bad} {DAMAGE[kind][1]}" in str(caught.value) and "There are checkpoints of steps 3." in str(caught.value)


def test_pickles_are_refused(tmp_path):
    """A pickle that would run code is never opened."""
    bomb = tmp_path / "pytorch_model.bin"
    bomb.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    for path in (bomb, tmp_path):
        with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle.*safe_serialization=True"):
            read_info(path)
    (tmp_path / "model.safetensors").touch()
    refuse_pickle(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_missing_damaged_and_other_formats(folder):
    with pytest.raises(FileNotFoundError, match=r"There are checkpoints of steps 3\."):
        read_info(folder.parent / "4")
    with pytest.raises(FileNotFoundError, match="There is none beside it either"):
        read_info(folder / "d" / "4")
    write_json(folder / "info.json", {"format": 9})
    with pytest.raises(ValueError, match="has checkpoint format 9; this version reads format 1"):
        read_info(folder)
    (folder / "info.json").write_text("{")
    with pytest.raises(ValueError, match=r"info.json is damaged: .* Use another checkpoint"):
        read_info(folder)
