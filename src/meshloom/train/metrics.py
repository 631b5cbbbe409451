"""What a run writes about itself: `metrics.jsonl` (the same bytes however often the run was killed and resumed), `timing.jsonl`, TensorBoard.

The device is never made to wait: a step's numbers are read when the next step has been sent.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from meshloom.core.files import explained, write_bytes

SUMS: tuple[str, ...] = ("loss", "z", "correct", "tokens")
"""Added up over an interval; the others are the values of its last step."""
LAST = ("norm", "lr", "scale", "skipped", "consecutive")
"""The values that every way of training tells of a step."""
ROUTERS = ("balance", "router_z", "load")
"""Added up too, where the model has experts. load: [layers with experts, experts + 1], assignments to each expert, and dropped ones."""
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Routers(NamedTuple):
    """What the routers did in an interval. balance: the load-balance loss of a layer, 1 where all experts are used alike. router_z: squared logsumexp
    of a layer's logits, a token. dropped: part of the assignments that found no place. load: [layer][expert], part of the layer's assignments."""

    balance: float
    router_z: float
    dropped: float
    load: list[list[float]]

    @property
    def busiest(self) -> float:
        """The largest load of an expert in any layer, as a multiple of its even share."""
        return max(max(layer) * len(layer) for layer in self.load)


class Line(NamedTuple):
    """One interval. loss: nats a token, over all tokens of the interval. tokens: scored."""

    step: int
    loss: float
    accuracy: float
    tokens: int
    norm: float
    lr: float
    scale: float
    skipped: int
    routers: Routers | None = None
    more: Mapping[str, float] = {}
    """What else the way of training tells of its last step, such as AdaScale's gain."""

    def tree(self) -> dict[str, Any]:
        """As it is written; null for what is no number, such as the norm of a skipped step."""
        values = {k: v for k, v in self._asdict().items() if k not in ("routers", "more")} | dict(self.more)
        own = {k: v if math.isfinite(v) else None for k, v in values.items()}
        return {"kind": "train", **own, **(self.routers._asdict() if self.routers else {})}


class Interval:
    """Sums since the last line, and the numbers of a step that has not been read yet."""

    def __init__(self, every: int, state: dict[str, dict[str, float]] | None = None):
        self.every = every
        held = state or {}
        self.sums: dict[str, Any] = held.get("sums") or dict.fromkeys(SUMS, 0.0)
        self.last: dict[str, float] = held.get("last", {})
        self.waiting: tuple[int, dict[str, jax.Array]] | None = None

    @property
    def state(self) -> dict[str, dict[str, float]]:
        """What a checkpoint keeps of it."""
        return {"sums": dict(self.sums), "last": dict(self.last)}

    def push(self, step: int, told: dict[str, jax.Array]) -> Line | None:
        """Takes a step's numbers; returns the line that the step before completes, if it completes one."""
        line = self.read()
        self.waiting = (step, told)
        return line

    def read(self) -> Line | None:
        """Reads the waiting step, which waits for the device if it is not done."""
        if self.waiting is None:
            return None
        (step, told), self.waiting = self.waiting, None
        told = jax.device_get(told)
        self.last = {name: float(value) for name, value in told.items() if value.ndim == 0}
        if math.isfinite(self.last["loss"]) and math.isfinite(self.last["norm"]):  # a skipped step is counted, but is no part of the mean
            for name in (*SUMS, *(name for name in ROUTERS if name in told)):
                self.sums[name] = (np.asarray(self.sums.get(name, 0.0)) + told[name].astype(np.float64)).tolist()
        return self.line(step) if step % self.every == 0 else None

    def rest(self, step: int) -> Line | None:
        """The line of an interval that the end of the run cuts short."""
        return self.line(step) if self.sums["tokens"] and self.last else None

    def line(self, step: int) -> Line:
        """The line of the interval that ends with this step; the next begins empty."""
        s, self.sums, last = self.sums, dict.fromkeys(SUMS, 0.0), self.last
        tokens = s["tokens"] or math.nan
        loss, correct = s["loss"] / tokens, s["correct"] / tokens
        return Line(
            step,
            loss,
            correct,
            int(s["tokens"]),
            last["norm"],
            last["lr"],
            last["scale"],
            int(last["skipped"]),
            _routers(s, len(s.get("load", ()))),
            {name: value for name, value in last.items() if name not in (*SUMS, *LAST, *ROUTERS)},
        )


def _routers(sums: dict[str, Any], layers: int) -> Routers | None:
    """What the routers did, from an interval's sums; None without experts.  Losses: a layer and scored token."""
    if not layers:
        return None
    load = np.asarray(sums["load"])
    each, dropped = load[:, :-1], load[:, -1]
    total = np.maximum(each.sum(-1, keepdims=True), 1)
    tokens = max(sums["tokens"], 1) * layers
    share = [[round(float(x), 6) for x in layer] for layer in each / total]
    return Routers(sums["balance"] / tokens, sums["router_z"] / tokens, float(dropped.sum() / total.sum()), share)


class Metrics:
    """The files of a run. start: steps done already: lines after them are taken out, so that what follows is written once.

    Lines about the state after step `start` (validation, text) are taken out too, and one of an interval of less than `every` steps that ended
    there: the loop makes them again.
    """

    def __init__(self, folder: Path, tensorboard: bool, every: int, start: int = 0):
        self.writes = jax.process_index() == 0
        self.board = None
        if not self.writes:
            return
        for name in (METRICS, TIMING):
            _cut(folder / name, start, every)
        self.files = {name: (folder / name).open("a", encoding="utf-8") for name in (METRICS, TIMING)}
        if tensorboard:
            self.board = _summary_writer()(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writes:
            for file in self.files.values():
                with suppress(OSError if error else ()):  # what could not be written cannot be written now either
                    file.close()
        if self.board:
            self.board.close()

    def write(self, values: dict[str, Any], name: str = METRICS) -> None:
        """One line, on disk when this returns."""
        if not self.writes:
            return
        file = self.files[name]
        with explained(file.name):
            file.write(json.dumps(values, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.board:
            for key, value in values.items():
                if isinstance(value, int | float) and key != "step":
                    self.board.add_scalar(f"{values.get('kind', 'timing')}/{key}", value, values["step"])


def _summary_writer() -> type:
    """tensorboardX's writer.  It imports torch where that is installed, for a type that our scalars never have: seconds of start-up. So torch is
    hidden while it is imported."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore  # makes `import torch` an ImportError, which tensorboardX expects
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter


def _cut(path: Path, start: int, every: int) -> None:
    """Takes out the lines that a resumed run writes again, and a last line that a crash left half written.
    Raises ValueError, naming the line, where one cannot be read: then nothing is changed."""
    if not path.exists():
        return
    raw = path.read_bytes()
    whole = [line for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = [line for number, line in enumerate(whole, 1) if _stays(_values(line, f"{path}:{number}"), start, every)]
    if b"".join(kept) != raw:
        write_bytes(path, b"".join(kept))


def _values(line: bytes, place: str) -> dict[str, Any]:
    """What a line holds.  Raises ValueError where it is not one that a run wrote."""
    try:
        values = json.loads(line)
        if isinstance(values["step"], int):
            return values
    except (ValueError, LookupError, TypeError):
        pass
    raise ValueError(f"{place} is damaged: it is not a line that a run wrote. Take the line out, or move the file away, and start again.")


def _stays(values: dict[str, Any], start: int, every: int) -> bool:
    whole = start % every == 0 and values.get("kind", "train") == "train"
    return values["step"] < start or (values["step"] == start and whole)


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind (train, valid, sample) of a run."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = enumerate(path.read_bytes().splitlines(), 1)
    return [values for number, line in lines if (values := _values(line, f"{path}:{number}"))["kind"] == kind]
