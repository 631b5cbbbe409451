"""The same command as one process with all devices and as two or four that share them out: the same losses, one checkpoint. The stages of a
pipeline are the outermost devices, so they lie in different processes.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
name: small
model: {family: llama, layers: 4, embed: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 4096, max_seq: 32}
data: {train: [{path: text.txt, split: paragraph}], valid: 0.1, seq: 32, cache: cache, workers: 1}
batch: {sequences: 8}
train: {steps: 4, runner: scan}
schedule: {kind: constant}
layout: "data=2 zero3=4"
log: {every: 1, tensorboard: false, plot: false}
checkpoint: {every: 2}
"""
HURRIED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""A compiler that hurries; every process compiles the whole program."""


def start(folder: Path, out: str, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshloom.cli", "train", "small.yaml", "--out", out, *flags]
    environ = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(folder / "cache"), "XLA_FLAGS": HURRIED}
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*runs: subprocess.Popen[str]) -> list[str]:
    """The output of processes that must all succeed; none is left behind, for SIGTERM alone does not end a distributed process."""
    try:
        told = [run.communicate(timeout=400)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, text in zip(runs, told):
        assert run.returncode == 0, text
    return told


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def written(folder: Path, layout: str) -> None:
    """The recipe, under a layout, and its text."""
    (folder / "small.yaml").write_text(RECIPE.replace("data=2 zero3=4", layout))
    (folder / "text.txt").write_text(
        "\n\n".join(f"Chapter {i}. " + f"The {i}th man walked to house number {i * 7}. " * 8 for i in range(60))
    )


def together(folder: Path, out: str, processes: int, devices: int) -> list[str]:
    """What processes with so many devices each say that train together."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    place = ["--devices", str(devices), "--coordinator", address, "--world", str(processes)]
    return finish(*(start(folder, out, *place, "--rank", str(rank)) for rank in range(processes)))


def same_run(one: Path, other: Path) -> None:
    """The same losses at the same steps, and checkpoints of the same."""
    a, b = lines(one), lines(other)
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for x, y in zip(a, b):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5)
    assert sorted(p.name for p in (other / "checkpoints").iterdir()) == sorted(p.name for p in (one / "checkpoints").iterdir())
    assert (other / "hf" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe's text, and in `one` its run by one process with eight devices, without a pipeline."""
    folder = tmp_path_factory.mktemp("processes")
    written(folder, "data=2 zero3=4")
    finish(start(folder, "one", "--devices", "8"))
    return folder


def test_two_processes_train_as_one(home: Path) -> None:
    written(home, "data=2 zero3=4")
    told = together(home, "two", 2, 4)
    same_run(home / "one", home / "two")
    assert "The run lies in" in told[0] and "The run lies in" not in told[1]


@pytest.mark.parametrize("layout, processes, devices", [("pipe=2:interleaved2 tensor=2", 2, 2), ("pipe=4 zero1=2", 4, 2)])
def test_a_pipeline_over_processes_trains_as_one(layout: str, processes: int, devices: int, home: Path) -> None:
    """Each process has one stage. What they wrote together, a process with one device goes on with."""
    written(home, layout)
    together(home, f"pipe{processes}", processes, devices)
    same_run(home / "one", home / f"pipe{processes}")
    if processes == 2:
        finish(start(home, "pipe2", "--resume", "--devices", "1", "--set", "layout=auto", "--set", "train.steps=5"))
        assert lines(home / "pipe2")[-1]["step"] == 5
