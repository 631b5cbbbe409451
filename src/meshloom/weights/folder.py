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
    check_free(target, overwrite)
    temporary, aside = (target.with_name(f".{target.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        if target.exists():
            target.rename(aside)
        temporary.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        left = f"{free(target.parent)} bytes free in {target.parent}"
        raise type(error)(error.errno, f"{error.strerror}: could not write {target} ({left}). Nothing was changed") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(target: Path, overwrite: bool) -> None:
    """Raises FileExistsError where writing `target` would overwrite files and that was not asked for."""
    if not overwrite and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists already. Choose another folder, or ask to overwrite it.")
