"""From the command to the first step, and how long a run waits for its data: both measured on `meshloom train quickstart` itself."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src"
COMMAND = "import sys; from meshloom.cli import main; sys.exit(main())"


class Start(NamedTuple):
    """seconds: from the command to the first step's numbers on disk. cpu: the process's CPU seconds until then, 0 where they cannot be read.
    waiting: part of the later steps spent on waiting for data."""

    seconds: float
    cpu: float
    waiting: float


def start(recipe: str, folder: Path, cache: Path, sets: tuple[str, ...] = (), steps: int = 12, limit: float = 300.0) -> Start:
    """Runs `meshloom train` until it has taken some steps, then ends it.  cache: the home of its caches; empty for a cold start."""
    given = [word for one in ("log.every=1", *sets) for word in ("--set", one)]
    command = [sys.executable, "-c", COMMAND, "train", recipe, "--out", str(folder), *given]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    begun = time.perf_counter()
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        first = _wait(process, folder / "metrics.jsonl", 1, begun + limit, log) - begun
        cpu = _cpu(process.pid)
        _wait(process, folder / "timing.jsonl", steps, begun + limit, log)
        lines = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()[2:steps]]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return Start(first, cpu, sum(t["waiting"] * t["seconds"] for t in lines) / max(sum(t["seconds"] for t in lines), 1e-9))


def _cpu(pid: int) -> float:
    """CPU seconds of a running process (Linux)."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _wait(process: subprocess.Popen, file: Path, lines: int, until: float, log: Path) -> float:
    """When `file` had that many lines.  Raises RuntimeError if the program ends first or it takes too long."""
    while not file.exists() or file.read_text().count("\n") < lines:
        if process.poll() is not None or time.perf_counter() > until:
            raise RuntimeError(f"{file} did not get {lines} lines. The end of the program's output:\n{log.read_text()[-2000:]}")
        time.sleep(0.02)
    return time.perf_counter()


def starts(recipe: str = "quickstart", again: int = 3, sets: tuple[str, ...] = ()) -> tuple[Start, list[Start]]:
    """A start with empty caches, and `again` starts after it with what that one left (compiled programs, tokens)."""
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place) / "cache"
        return start(recipe, Path(place) / "cold", cache, sets), [
            start(recipe, Path(place) / f"warm{i}", cache, sets) for i in range(again)
        ]
