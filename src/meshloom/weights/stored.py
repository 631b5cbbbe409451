"""What lies in a checkpoint's folder, read without loading an array: its info, whether it is whole, and whether every file is as it was written."""

import json
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from jax.experimental import multihost_utils

FORMAT = 1
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")


def read_info(path: str | os.PathLike) -> dict:
    """The info of one checkpoint folder.  Raises FileNotFoundError, or ValueError for another format; pickles are refused."""
    path = Path(path)
    refuse_pickle(path)
    try:
        info = json.loads((path / "info.json").read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} holds no whole Meshloom checkpoint: it has no info.json. {choices(path)}") from None
    except ValueError as error:
        raise ValueError(f"{path / 'info.json'} is damaged: {error}. Use another checkpoint.") from None
    if not isinstance(info, dict):
        raise ValueError(f"{path / 'info.json'} is damaged: it holds no names and values. Use another checkpoint.")
    if info.get("format") != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {info.get('format')}; this version reads format {FORMAT}. Use the version that wrote it."
        )
    return info


def choices(path: Path) -> str:
    """What checkpoints lie in or beside a folder."""
    near = sorted({int(d.name) for f in (path, path.parent) if f.is_dir() for d in f.iterdir() if d.name.isdecimal() and whole(d)})
    return f"There are checkpoints of steps {', '.join(map(str, near))}." if near else "There is none beside it either."


def whole(path: Path) -> bool:
    """Whether every process has finished writing this checkpoint."""
    try:
        info = json.loads((path / "info.json").read_text())
        return all((path / f"files.{i}.json").exists() for i in range(info["processes"]))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def unfinished(path: Path) -> bool:
    """Whether the writing of a checkpoint was broken off. What is written last, and whole or not at all, is missing then; what is there and
    cannot be read was damaged later, and is no reason to remove anything."""
    try:
        info = json.loads((path / "info.json").read_text())
        return info["processes"] > 1 and not whole(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, LookupError, TypeError):
        return False


def fault_of(path: Path) -> str:
    """Why a folder is not a whole checkpoint."""
    if not (path / "info.json").exists():
        return "it has no info.json"
    try:
        count = json.loads((path / "info.json").read_text())["processes"]
        return "it lacks " + ", ".join(f"files.{i}.json" for i in range(count) if not (path / f"files.{i}.json").exists())
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"its info.json cannot be read ({type(error).__name__}: {error})"


def refuse_pickle(path: str | os.PathLike) -> None:
    """Raises ValueError if the path is a pickle file, or a folder whose only weights are pickles. Nothing is ever unpickled."""
    path = Path(path)
    inside = [p for p in path.iterdir() if p.suffix in PICKLES or p.suffix == ".safetensors"] if path.is_dir() else [path]
    bad = [p for p in inside if p.suffix in PICKLES]
    if bad and len(bad) == len(inside):
        raise ValueError(
            f"{bad[0]} is a pickle: loading it runs whatever code it holds, so Meshloom never does. "
            "Save it as safetensors with the program that made it (transformers: save_pretrained(folder, safe_serialization=True))."
        )


def _checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size = total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total, size = zlib.crc32(block, total), size + len(block)
    return size, total


def _writer(name: str) -> int:
    """The process that lists a file: the one whose folder it is in, else process 0."""
    match = re.match(r"ocdbt\.process_(\d+)/", name)
    return int(match[1]) if match else 0


def list_files(path: Path, process: int) -> dict[str, tuple[int, int]]:
    """Name -> (bytes, CRC-32) of the files of one process."""
    names = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    names = [n for n in names if _writer(n) == process and not re.fullmatch(r"files\.\d+\.json|info\.json", n)]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda n: _checksum(path / n), names)))


def _listed(file: Path) -> dict[str, tuple[int, int]]:
    """Name -> (bytes, CRC-32), as one process wrote it down.  Raises ValueError where that is damaged."""
    try:
        return {str(name): (int(size), int(check)) for name, (size, check) in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"The checkpoint is damaged: {file} cannot be read ({error}). {_other(file.parent)}") from None


def _other(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    return f"Use another one; to resume from an earlier one, move {path} away. {choices(path.parent)}"


def check_files(path: str | os.PathLike) -> None:
    """Raises ValueError naming every file of a checkpoint that is missing, of another size, or has other contents than were written.
    With several processes each reads its share of the files, and all learn of the damage."""
    path = Path(path)
    count, own = jax.process_count(), jax.process_index()
    listed = {n: v for f in sorted(path.glob("files.*.json")) for n, v in _listed(f).items()}
    names = sorted(listed)[own::count]

    def fault(name: str) -> str:
        try:
            found = _checksum(path / name)
        except OSError as error:
            return f"{path / name} cannot be read ({error.strerror})"
        if found[0] != listed[name][0]:
            return f"{path / name} has {found[0]:,} bytes instead of {listed[name][0]:,}"
        return "" if found == listed[name] else f"{path / name} has other contents than were written (CRC-32)"

    with ThreadPoolExecutor(4) as pool:
        faults = [said for said in pool.map(fault, names) if said]
    if count > 1 and not faults and multihost_utils.process_allgather(len(faults)).any():
        faults = [f"another process found a damaged file in {path}"]
    elif count > 1 and faults:
        multihost_utils.process_allgather(len(faults))
    if faults:
        raise ValueError(f"The checkpoint is damaged: {'; '.join(faults)}. {_other(path)}")
