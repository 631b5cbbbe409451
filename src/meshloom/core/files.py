"""Files that are whole or absent, a folder that one process uses at a time, and disk errors as sentences. Standard library only."""

import contextlib
import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self


def human(size: float) -> str:
    """Bytes for people: 1.5 GB (powers of 1000)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} TB"


def bytes_of(size: int) -> str:
    """Bytes for people, with their exact number."""
    return human(size) if size < 1000 else f"{human(size)}, {size:,} bytes"


def free(path: Path) -> int:
    """Bytes free for this user on the disk that holds `path`, or would hold it."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def existing(path: Path) -> Path:
    """The nearest folder above `path`, or itself, that is there."""
    return path if path.is_dir() or path == path.parent else existing(path.parent)


REASONS = {
    errno.ENOSPC: lambda path: f"the disk has {human(free(path))} free. Free some space, or use another folder",
    errno.EDQUOT: lambda path: "your quota on this disk is used up. Free some space, or use another folder",
    errno.EFBIG: lambda path: "a file would be larger than this system allows (see `ulimit -f`). Raise the limit, or use another folder",
    errno.EACCES: lambda path: f"{existing(path)} may not be written by user {os.getuid()}. Change its permissions, or use another folder",
    errno.EPERM: lambda path: f"{existing(path)} may not be written by user {os.getuid()}. Change its permissions, or use another folder",
    errno.EROFS: lambda path: f"{existing(path)} is on a read-only disk. Use another folder",
    errno.ENOTDIR: lambda path: f"{existing(path)} is the last folder on that path; what follows is a file. Use another folder",
}
"""Error number -> what is true, and what to do."""


def sentence(error: OSError, path: str | os.PathLike, size: int | None = None) -> OSError:
    """The same error, with a message that says what could not be written, how large it is, why, and what to do.  size: bytes."""
    path = Path(path)
    reason = REASONS.get(error.errno or 0, lambda path: (error.strerror or str(error)).rstrip("."))(path)
    what = f"Cannot write {path}" + (f" ({bytes_of(size)})" if size is not None else "")
    said = type(error)(f"{what}: {reason}.")
    said.errno = error.errno
    return said


@contextlib.contextmanager
def explained(path: str | os.PathLike, size: int | None = None) -> Iterator[None]:
    """Turns an OSError inside into a sentence about `path`."""
    try:
        yield
    except OSError as error:
        raise sentence(error, path, size) from error


def check_ours(path: Path, head: str, kind: str) -> None:
    """Refuses, before the work that is to be written, a file that cannot be, and one that is there and did not come from here.  head: how ours begin.
    kind: what ours are, in words.  Raises OSError and ValueError, each with a sentence."""
    if path.is_dir():
        raise sentence(IsADirectoryError(errno.EISDIR, "it is a folder. Name a file in it"), path)
    if not os.access(existing(path.parent), os.W_OK):
        raise sentence(PermissionError(errno.EACCES, "not allowed"), path)
    if path.exists() and not path.read_bytes().startswith(head.encode()):
        raise ValueError(f"{path} is there already and is no {kind}. Name another file, or take this one away first.")


def read_lines(file: Path) -> list[str]:
    """The lines of a text file.  Raises ValueError where it is not UTF-8 text, or has no line."""
    try:
        lines = file.read_bytes().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    if not lines:
        raise ValueError(f"{file} is empty. Write at least one line in it.")
    return lines


def sync_folder(folder: Path) -> None:
    """Waits until the folder's list of names is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file that is either the old one or the new one, whole, at every moment. Makes the folders above it.
    Raises OSError with a sentence; the old file is then untouched and nothing is left behind."""
    path = Path(path)
    with explained(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_folder(path.parent)


def _umask() -> int:
    """The permissions that new files do not get. (It can only be read by setting it.)"""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_text(path: str | os.PathLike, text: str) -> None:
    """`write_bytes` for text, in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike, value: object) -> None:
    """`write_bytes` for a value as JSON, indented, keys in their own order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class FolderLock:
    """One process uses a run folder at a time. A context manager; `said` is what to tell the user, or empty.

    The lock is the system's (POSIX record lock on `.lock`), so it ends with its process however that ends, and child processes do not
    inherit it. The file holds pid and host: to name who has it, and to say that a process died without leaving."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self.path = Path(folder) / ".lock"
        self.said = ""
        self._file: Any = None

    def __enter__(self) -> Self:
        """Takes the lock.  Raises BlockingIOError, naming pid and host, if a living process has it."""
        import fcntl

        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+", encoding="utf-8")
        self._file.seek(0)
        owner = _owner(self._file.read())
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise sentence(error, self.path) from error
            raise BlockingIOError(
                f"{self.path.parent} is in use by process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}. "
                "Wait until it ends, or give this run another folder."
            ) from None
        if owner:
            self.said = (
                f"Process {owner.get('pid')} on {owner.get('host')} ended without leaving {self.path.parent}; this process takes it over."
            )
        try:
            self._write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except OSError:
            with contextlib.suppress(OSError):  # closing tries to write again
                self._file.close()
            raise
        return self

    def _write(self, text: str) -> None:
        assert self._file is not None
        with explained(self.path):
            self._file.truncate(0)
            self._file.write(text)
            self._file.flush()

    def __exit__(self, *_: object) -> None:
        """Empties the file, which says that the process left in order, and gives the lock back."""
        self._write("")
        assert self._file is not None
        self._file.close()


def _owner(text: str) -> dict:
    """What a lock file says, or nothing where it is empty or torn."""
    try:
        return dict(json.loads(text)) if text else {}
    except (ValueError, TypeError):
        return {}
