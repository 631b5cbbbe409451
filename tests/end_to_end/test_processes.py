"""The same command as one process with eight devices and as two with four each: the same losses, one checkpoint."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
name: small
model: {family: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 4096, max_seq: 32}
data: {train: [{path: text.txt, split: paragraph}], valid: 0.1, seq: 32, cache: cache, workers: 1}
batch: {sequences: 8}
train: {steps: 4}
schedule: {kind: constant}
layout: "data=2 zero3=4"
log: {every: 1, tensorboard: false, plot: false}
checkpoint: {every: 2}
"""


def start(folder: Path, out: str, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshloom.cli", "train", "small.yaml", "--out", out, *flags]
    environ = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(folder / "cache")}
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


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"Chapter {i}. " + f"The {i}th man walked to house number {i * 7}. " * 8 for i in range(60))
    )
    finish(start(tmp_path, "one", "--devices", "8"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    place = ["--devices", "4", "--coordinator", address, "--world", "2"]
    told = finish(*(start(tmp_path, "two", *place, "--rank", str(rank)) for rank in range(2)))
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert sorted(p.name for p in (tmp_path / "two" / "checkpoints").iterdir()) == sorted(
        p.name for p in (tmp_path / "one" / "checkpoints").iterdir()
    )
    assert (tmp_path / "two" / "hf" / "model.safetensors").is_file()
    assert "The run lies in" in told[0] and "The run lies in" not in told[1]
