"""Whole files, one process a folder, and disk errors that read as sentences."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshloom.core.files import (
    REASONS,
    FolderLock,
    bytes_of,
    check_ours,
    free,
    human,
    read_lines,
    sentence,
    write_bytes,
    write_json,
    write_text,
)

HOLD = """
import sys, time
from meshloom.core.files import FolderLock
with FolderLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder):
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_write_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"é": 1})
    write_text(path, "second")
    assert path.read_text() == "second" and [p.name for p in path.parent.iterdir()] == ["b.json"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, number):
    path = tmp_path / "x"
    write_bytes(path, b"old")

    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as caught:
        write_bytes(path, b"n" * 2500)
    message = str(caught.value)
    assert message.startswith(f"Cannot write {path} (2.5 kB, 2,500 bytes): ") and message.endswith(".") and caught.value.errno == number
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_file_size_limit_for_real(tmp_path):
    """A true refusal by the kernel, in a process of its own."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from meshloom.core.files import write_bytes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "write_bytes(sys.argv[1], b'x' * 9000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "big")], capture_output=True, text=True)
    assert done.returncode == 1 and "9 kB, 9,000 bytes): a file would be larger than this system allows" in done.stderr
    assert os.listdir(tmp_path) == []


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(OSError, match="is the last folder on that path"):
        write_bytes(tmp_path / "f" / "g" / "h", b"")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_no_permission_for_real(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="may not be written by user"):
        write_bytes(tmp_path / "x", b"")


@pytest.mark.parametrize("number", REASONS)
def test_every_reason_is_a_sentence(tmp_path, number):
    said = sentence(OSError(number, "raw"), tmp_path / "deep" / "x", 10)
    assert type(said) is type(OSError(number, "raw")) and str(tmp_path) in str(said) and ". " in str(said) and str(said).endswith(".")


def test_human_and_free(tmp_path):
    assert [human(n) for n in (0, 999, 1500, 2e6, 3.21e9, 5e12)] == ["0 bytes", "999 bytes", "1.5 kB", "2 MB", "3.21 GB", "5 TB"]
    assert free(tmp_path / "not" / "there") > 0


def test_lock_names_the_other_process(tmp_path):
    other = holder(tmp_path)
    try:
        with pytest.raises(BlockingIOError, match=f"{tmp_path} is in use by process {other.pid} on "), FolderLock(tmp_path):
            pass
    finally:
        other.kill()
        other.wait()


def test_lock_of_a_dead_process_is_taken_over(tmp_path):
    other = holder(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.wait()
    with FolderLock(tmp_path) as lock:
        assert lock.said.startswith(f"Process {other.pid} on ") and "takes it over" in lock.said
    with FolderLock(tmp_path) as lock:
        assert lock.said == ""


def test_torn_lock_file(tmp_path):
    Path(tmp_path / ".lock").write_text('{"pid": 1')
    with FolderLock(tmp_path) as lock:
        assert lock.said == ""


def test_a_full_disk_is_told_by_the_lock_too(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def fileno(self):
            return handle

        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr("builtins.open", lambda *_, **__: Full())
    with pytest.raises(OSError, match=r"Cannot write .*\.lock: the disk has .* free\. Free some space"), FolderLock(tmp_path):
        pass
    os.close(handle)


def test_few_bytes_are_said_once():
    assert (bytes_of(161), bytes_of(5_182_492)) == ("161 bytes", "5.18 MB, 5,182,492 bytes")


def test_lines_of_a_text_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\r\ntwo ä\n".encode())
    assert read_lines(file) == ["one", "two ä"]
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"prompts\.txt is not UTF-8 text \(byte 3\)\. Save it as UTF-8"):
        read_lines(file)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"prompts\.txt is empty\. Write at least one line"):
        read_lines(file)


def test_only_files_of_the_same_kind_are_written_over(tmp_path):
    check_ours(tmp_path / "new" / "a", "# ours", "plan")
    (tmp_path / "a").write_text("# ours, of yesterday")
    check_ours(tmp_path / "a", "# ours", "plan")
    (tmp_path / "b").write_text("theirs")
    with pytest.raises(ValueError, match="b is there already and is no plan. Name another file"):
        check_ours(tmp_path / "b", "# ours", "plan")
    with pytest.raises(OSError, match="it is a folder. Name a file in it"):
        check_ours(tmp_path, "# ours", "plan")
