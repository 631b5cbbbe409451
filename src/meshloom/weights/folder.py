"""A folder that appears whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshloom.core.files import free


@contextlib.contextmanager
def whole_folder(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes it when the block ends well, and is removed when it does not.

    Raises FileExistsError before anything is written if `target` holds files and overwrite is False; OSError naming the folder where the disk
    is full or may not be written.
    """
    target = target if target.name else target.resolve()
    check_free(target, overwrite)
    temporary, aside = (target.with_name(f".{target.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _tidy(target)
        temporary.mkdir()
        yield temporary
        if target.exists():
            target.rename(aside)
        try:
            temporary.rename(target)
        except OSError:
            aside.rename(target)
            raise
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
    except OSError as error:
        left = f"{free(target.parent)} bytes free in {target.parent}"
        raise type(error)(error.errno, f"{error.strerror}: could not write {target} ({left}). Nothing was changed") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tidy(target: Path) -> None:
    """Ends what a killed process began: an old folder that it had put aside comes back where no new one took its place; the rest is removed."""
    for left in [*target.parent.glob(f".{target.name}.old-*"), *target.parent.glob(f".{target.name}.new-*")]:
        process = left.name.rsplit("-", 1)[-1]
        if process.isdecimal() and (int(process) == os.getpid() or not _alive(int(process))):
            if ".old-" in left.name and not target.exists():
                left.rename(target)
            else:
                shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def check_free(target: Path, overwrite: bool) -> None:
    """Raises FileExistsError where writing `target` would overwrite files and that was not asked for, or would remove a run."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists already. Choose another folder, or ask to overwrite it (--overwrite).")
    if (target / "run.yaml").exists() or (target / "checkpoints").exists():
        raise FileExistsError(
            f"{target} is the folder of a run: overwriting would remove its checkpoints. Choose another folder, such as {target / 'hf'}."
        )


KNOWN_BY = ("config.json", "info.json")
"""One of these lies in every folder of a model and of a checkpoint."""


def check_model(target: Path) -> None:
    """Raises FileExistsError where a folder that the user names to be overwritten holds something else than a model."""
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not any((target / name).exists() for name in KNOWN_BY)):
        raise FileExistsError(
            f"{target} holds something else than a model, so it is not overwritten. Choose another folder, or empty it yourself."
        )
