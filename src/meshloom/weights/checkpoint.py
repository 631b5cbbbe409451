"""Checkpoints: asynchronous, sharded, atomic; restored under any layout and number of devices. Orbax writes the arrays.

A checkpoint is the folder `<step>/`: Orbax's files, `files.<process>.json` (bytes and CRC-32 of every file that process wrote) and, last,
`info.json` (format, run, step, model, data position, layout, packages, names and shapes of the arrays). It counts once all of these are
there, so a process killed at any moment leaves the previous checkpoint as the newest. Arrays are named by dotted path
(`params.layers.q`), so reading one needs no class of ours; `info.json` can be read without JAX and without the old mesh.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from meshloom.core.files import REASONS, bytes_of, explained, free, write_json
from meshloom.core.tree import Tree, named_leaves
from meshloom.weights.stored import FORMAT, check_files, choices, fault_of, list_files, read_info, unfinished, whole

PACKAGES = ("meshloom", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
TEMPORARY = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*|\.removed)")


# ---- does it fit? ----


def differences(saved: Mapping, now: Mapping, prefix: str = "") -> list[str]:
    """The fields in which two configurations differ: `heads: 4 -> 8`, nested ones by dotted path."""
    out = []
    for key in dict.fromkeys((*saved, *now)):
        a, b = saved.get(key, "absent"), now.get(key, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += differences(a, b, f"{prefix}{key}.")
        elif json.loads(json.dumps(a)) != json.loads(json.dumps(b)):
            out.append(f"{prefix}{key}: {a} -> {b}")
    return out


def check_same(what: str, saved: Mapping, now: Mapping, path: str | os.PathLike) -> None:
    """Raises ValueError naming the fields in which what a checkpoint was made with differs from what is asked now.  what: 'model', ..."""
    if found := differences(saved, now):
        raise ValueError(
            f"{path} was made with another {what} ({'; '.join(found)}). Set these fields back to resume it, or start a new run in another folder."
        )


# ---- arrays by name ----


def _is_key(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_impl(x: Any) -> str:
    """The generator of abstract keys. (JAX tells it of arrays alone, tracers included.)"""
    found = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), x)
    return found[0]


def _by_name(tree: Tree) -> dict[str, jax.Array]:
    """Every array by its dotted path; random keys as their data."""
    return {name: jax.random.key_data(x) if _is_key(x) else x for name, x in named_leaves(tree).items()}


def _wanted(x: Any) -> jax.ShapeDtypeStruct:
    """What is asked of Orbax for one leaf: shape, type and place. Without a place, the first device."""
    place = x.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if _is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        if isinstance(place, jax.sharding.NamedSharding):
            place = jax.sharding.NamedSharding(
                place.mesh, jax.sharding.PartitionSpec(*place.spec, *[None] * (x.ndim - len(place.spec) + 1))
            )
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=place)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _describe(x: Any) -> dict:
    return {"shape": list(x.shape), "dtype": str(x.dtype)}


def _check_arrays(path: Path, saved: Mapping[str, dict], wanted: Mapping[str, Any], part: bool) -> None:
    """Raises ValueError listing every array that is missing, left over, or of another shape or type."""
    missing = [n for n in wanted if n not in saved]
    extra = [] if part else [n for n in saved if n not in wanted]
    other = [f"{n} {saved[n]} -> {_describe(x)}" for n, x in wanted.items() if n in saved and saved[n] != _describe(x)]
    found = [
        f"{what} {', '.join(names)}"
        for what, names in (("it lacks", missing), ("it has besides", extra), ("these differ:", other))
        if names
    ]
    if found:
        raise ValueError(
            f"{path} does not fit what is to be restored ({len(saved)} arrays saved, {len(wanted)} wanted): {'; '.join(found)}. "
            "Restore with the model and the optimizer that it was made with, or its weights alone."
        )


def load(path: str | os.PathLike, abstract: Tree, part: bool = False) -> Tree:
    """The arrays of one checkpoint.  abstract: a tree of jax.ShapeDtypeStruct with shardings, of any layout and device count; returns the
    same structure.  part: take only what `abstract` names, as {"params": ...} for the weights alone; else every saved array must be asked for.
    Raises ValueError naming a damaged file, or the arrays that do not fit."""
    path = Path(path).absolute()
    info = read_info(path)
    leaves = named_leaves(abstract)
    wanted = {name: _wanted(x) for name, x in leaves.items()}
    _check_arrays(path, info["arrays"], wanted, part)
    check_files(path)
    import orbax.checkpoint as ocp

    args = ocp.args.PyTreeRestore(item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=part)
    try:
        with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
            arrays = reader.restore(path, args=args)
    except Exception as error:
        raise ValueError(f"The arrays in {path} cannot be read ({_first_line(error)}). Use another checkpoint. {choices(path)}") from error
    out = [jax.random.wrap_key_data(arrays[n], impl=_key_impl(x)) if _is_key(x) else arrays[n] for n, x in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), out)


# ---- writing ----


def kept(steps: list[int], scores: Mapping[int, float], last: int, every: int, best: int) -> set[int]:
    """The steps that stay: the `last` newest by number, the multiples of `every`, the `best` with the lowest score. 0 keeps none for that reason."""
    ranked = sorted((s for s in steps if s in scores), key=lambda s: (scores[s], -s))
    return {*sorted(steps)[-last:], *(s for s in steps if every and s % every == 0), *ranked[:best]}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


SPOKEN = {"No space left": errno.ENOSPC, "quota exceeded": errno.EDQUOT, "File too large": errno.EFBIG, "Permission denied": errno.EACCES}
"""Words in an error of the storage library -> the error number that it had."""


def _save_error(error: BaseException, path: Path, size: int, previous: int | None) -> OSError:
    """The failure of a save as a sentence: path, bytes, why, what is still there."""
    chain, cause = "", error
    while cause is not None:
        chain, cause = f"{chain} {getattr(cause, 'errno', '')} {cause}", cause.__cause__ or cause.__context__
    number = getattr(error, "errno", None) or next((n for words, n in SPOKEN.items() if words in chain), 0)
    reason = REASONS[number](path) if number in REASONS else _first_line(error)
    rest = f"The checkpoint of step {previous} is whole." if previous is not None else "There is no earlier one."
    said = OSError(f"Cannot write checkpoint {path} ({bytes_of(size)}): {reason.rstrip('.')}. {rest}")
    said.errno = number
    return said


class Checkpoints:
    """The checkpoints of one run in a folder. Every process makes one and calls the same methods at the same steps.

    `said`: what to tell the user about what was found. Folders of other runs are never counted, restored or removed."""

    def __init__(
        self, folder: str | os.PathLike, keep_last: int = 2, keep_every: int = 0, keep_best: int = 0, resume: bool = False
    ) -> None:
        """resume: the folder's checkpoints are this run's, even where the file that names the run is lost."""
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least 1 checkpoint must stay. Use 1 or more.")
        self.folder = Path(folder).absolute()
        self.keep = (keep_last, keep_every, keep_best)
        self.said: list[str] = []
        self._first = jax.process_index() == 0
        if self._first:
            self._open(resume)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("meshloom checkpoints opened")
        self.run = str(json.loads((self.folder / "run.json").read_text())["run"])
        self._writer: Any = None
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, int, Future] | None = None

    def _open(self, resume: bool) -> None:
        """Gives the folder its run, says which folders are foreign, and clears what an earlier process left unfinished."""
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        run = self._name(resume)
        for path in sorted(self.folder.iterdir()):
            name = path.name
            if TEMPORARY.fullmatch(name) or (name.isdecimal() and unfinished(path) and self._started_here(path)):
                self.said.append(f"Removed {path}: its writing never finished.")
                shutil.rmtree(path, ignore_errors=True)
            elif name.isdecimal() and not whole(path):
                self.said.append(f"Left {path} alone: it is damaged, or something else.")
            elif name.isdecimal() and read_info(path).get("run") != run:
                self.said.append(f"Left {path} alone: it belongs to another run.")

    def _name(self, resume: bool) -> str:
        """The run that the folder belongs to: what `run.json` says; where that is missing or damaged, what all whole checkpoints say, for one
        that is resumed; else a new name.  Raises ValueError where they belong to several."""
        file = self.folder / "run.json"
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads(file.read_text())["run"])
        names = {read_info(d).get("run") for d in self.folder.iterdir() if resume and d.name.isdecimal() and whole(d)}
        if len(names) > 1:
            raise ValueError(
                f"{file} is missing or damaged, and the checkpoints beside it belong to {len(names)} runs. Move those of the other runs away."
            )
        if names:
            self.said.append(f"{file} was missing or damaged; the checkpoints beside it say which run this is.")
        write_json(file, {"run": names.pop() if names else uuid.uuid4().hex})
        return str(json.loads(file.read_text())["run"])

    def _started_here(self, path: Path) -> bool:
        """Whether this run began to write that step; noted in `writing.json` before the first byte."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "writing.json").read_text())["step"] == int(path.name)
        return False

    # ---- what is there ----

    def steps(self) -> list[int]:
        """The steps of this run's whole checkpoints, by number."""
        found = [d for d in self.folder.iterdir() if d.name.isdecimal() and whole(d) and read_info(d).get("run") == self.run]
        return sorted(int(d.name) for d in found)

    def latest(self) -> int | None:
        """The newest whole checkpoint's step, the same on every process; None if there is none."""
        steps = self.steps()
        step = steps[-1] if steps else -1
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(jax.numpy.int32(step)))
        return None if step < 0 else step

    def resumable(self) -> int | None:
        """`latest`, to go on from; None where no checkpoint was ever finished here.
        Raises ValueError where a later one is damaged or belongs to another run: going on would lose its steps, or meet it."""
        newest = self.latest()
        others = sorted(int(d.name) for d in self.folder.iterdir() if d.name.isdecimal() and int(d.name) not in self.steps())
        if others and others[-1] > (-1 if newest is None else newest):
            path = self.path(others[-1])
            before = "from the start" if newest is None else f"from step {newest}"
            why = "belongs to another run" if whole(path) else f"is damaged: {fault_of(path)}"
            raise ValueError(f"{path}, the newest checkpoint, {why}. To go on {before}, move that folder away.")
        return newest

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.folder / str(step)

    def info(self, step: int) -> dict:
        """The info of a step."""
        return read_info(self.path(step))

    def restore(self, abstract: Tree, step: int | None = None, part: bool = False) -> Tree:
        """`load` of a step, or of the latest, after the save under way is whole."""
        self.wait()
        step = self.latest() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint of this run. Start it without resuming.")
        return load(self.path(step), abstract, part)

    # ---- saving ----

    def save(self, step: int, tree: Tree, info: Mapping[str, Any]) -> bool:
        """Starts writing; returns when the arrays may be changed or donated.  info: JSON values, as model, data, layout.
        False if this run already has the step.  Raises OSError if the previous save failed, or if this one will not fit on the disk."""
        self.wait()
        path = self.path(step)
        if path.exists():
            if step in self.steps():
                return False
            raise FileExistsError(f"{path} holds something that this run did not write. Move it away, or give this run another folder.")
        arrays = _by_name(tree)
        size = sum(x.nbytes for x in arrays.values())
        if self._first:
            if free(self.folder) < size:
                raise _save_error(OSError(errno.ENOSPC, ""), path, size, self._previous())
            write_json(self.folder / "writing.json", {"step": step})
        whole_info = {
            "format": FORMAT,
            "run": self.run,
            "step": step,
            "processes": jax.process_count(),
            "bytes": size,
            "packages": {name: _version(name) for name in PACKAGES},
            **info,
            "arrays": {name: _describe(x) for name, x in arrays.items()},
        }
        import orbax.checkpoint as ocp  # at the first save, when training already goes

        self._writer = self._writer or ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        try:
            self._writer.save(path, args=ocp.args.PyTreeSave(arrays))
        except Exception as error:
            raise self._failed(error, step, size) from error
        self._pending = (step, size, self._pool.submit(self._finish, path, whole_info))
        return True

    def _finish(self, path: Path, info: dict) -> None:
        """In the background: waits for Orbax, then lists this process's files and, on process 0, writes the info that makes it count."""
        self._writer.wait_until_finished()
        deadline = time.monotonic() + 600
        while not path.exists():  # another process renames it
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} did not appear within 600 s after it was written; all processes need the same folder")
            time.sleep(0.05)
        write_json(path / f"files.{jax.process_index()}.json", list_files(path, jax.process_index()))
        if self._first:
            write_json(path / "info.json", info)

    def check(self) -> None:
        """Call at every step: never waits. Raises OSError if a save failed; removes old checkpoints once the new one is whole."""
        if self._pending and self._pending[2].done():
            self._settle()

    def wait(self) -> None:
        """`check`, after waiting until the save under way is whole."""
        if self._pending:
            self._pending[2].exception()
            while not self._settle():
                time.sleep(0.05)

    def _settle(self) -> bool:
        """Ends a save whose thread is over. False while other processes still list their files."""
        assert self._pending
        step, size, future = self._pending
        if error := future.exception():
            self._pending = None
            raise self._failed(error, step, size) from error
        if not whole(self.path(step)):
            return False
        self._pending = None
        self._retain()
        return True

    def _failed(self, error: BaseException, step: int, size: int) -> OSError:
        """Removes what a failed save left, which may be what fills the disk, and returns the error to raise."""
        if self._first:
            for path in self.folder.glob(f"{step}*"):
                if path.name == str(step) or TEMPORARY.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
        return _save_error(error, self.path(step), size, self._previous())

    def _previous(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    # ---- retention ----

    def score(self, step: int, loss: float) -> None:
        """Notes the validation loss of a step, by which keep_best chooses; removes what is then the best no longer."""
        if self._first:
            write_json(self.folder / "scores.json", {**self._scores(), step: loss})
        if self._pending is None:
            self._retain()

    def _scores(self) -> dict[int, float]:
        try:
            return {int(k): float(v) for k, v in json.loads((self.folder / "scores.json").read_text()).items()}
        except (OSError, ValueError):
            return {}

    def _retain(self) -> None:
        """Removes this run's checkpoints that no rule keeps."""
        if self._first:
            steps = self.steps()
            for step in set(steps) - kept(steps, self._scores(), *self.keep):
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Takes the folder's name away first, so that a half-removed one is never taken for a whole one."""
        gone = self.folder / f"{step}.removed"
        os.rename(self.path(step), gone)
        shutil.rmtree(gone, ignore_errors=True)

    def close(self) -> None:
        """Waits for the save under way. Raises as `wait` does, after everything is closed."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            if self._writer:
                self._writer.close()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
