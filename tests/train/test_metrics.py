"""Lines are token-weighted over their interval, and the same bytes after a crash and a resume."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from meshloom.train.metrics import METRICS, Interval, Metrics, read


def told(loss: float, tokens: float, **more: float) -> dict:
    values = {
        "loss": loss,
        "tokens": tokens,
        "correct": 0.0,
        "z": 0.0,
        "norm": 1.0,
        "lr": 0.1,
        "scale": 1.0,
        "skipped": 0,
        "consecutive": 0,
    }
    return {name: jnp.float32(value) for name, value in (values | more).items()}


def test_interval_weighs_by_tokens():
    """C98: one step with 1 token of 4.0, one with 3 of 1.0: 1.75, not 2.5."""
    interval = Interval(2)
    assert interval.push(1, told(4.0, 1)) is None
    assert interval.push(2, told(3.0, 3, lr=0.2)) is None, "a step is read one step later"
    line = interval.read()
    assert line is not None
    assert (line.step, line.loss, line.tokens) == (2, 1.75, 4)
    assert line.lr == pytest.approx(0.2)


def test_partial_interval_survives():
    """What a checkpoint in the middle of an interval keeps gives the same line as no stop at all."""
    one, two = Interval(3), Interval(3)
    one.push(1, told(4.0, 1))
    one.read()
    kept = json.loads(json.dumps(one.state))
    one.push(2, told(2.0, 2)), one.push(3, told(9.0, 1))
    again = Interval(3, kept)
    again.push(2, told(2.0, 2)), again.push(3, told(9.0, 1))
    two.push(1, told(4.0, 1)), two.push(2, told(2.0, 2)), two.push(3, told(9.0, 1))
    assert again.read() == one.read() == two.read()


def test_a_skipped_step_is_no_part_of_the_mean():
    """Its loss is not a number; the line stays valid JSON."""
    interval = Interval(2)
    interval.push(1, told(4.0, 2))
    interval.push(2, told(float("nan"), 5, norm=float("inf"), skipped=1))
    line = interval.read()
    assert line is not None and (line.loss, line.tokens, line.skipped) == (2.0, 2, 1)
    assert json.loads(json.dumps(line.tree(), allow_nan=False))["norm"] is None


def test_state_is_a_copy():
    """The state of a save that is still being written does not change under it."""
    interval = Interval(5)
    interval.push(1, told(1.0, 1))
    interval.read()
    state = interval.state
    interval.push(2, told(1.0, 1))
    interval.read()
    assert state["sums"]["tokens"] == 1


def test_resume_cuts_what_is_written_again(tmp_path):
    """Lines after the resumed step go, and those about its state; a half-written last line goes."""
    lines = [
        {"kind": "train", "step": 2},
        {"kind": "train", "step": 4},
        {"kind": "valid", "step": 4, "loss": 1.0},
        {"kind": "train", "step": 6},
    ]
    raw = "".join(json.dumps(x) + "\n" for x in lines) + '{"kind": "tra'
    (tmp_path / METRICS).write_text(raw)
    with Metrics(tmp_path, False, 2, 4) as metrics:
        metrics.write({"kind": "valid", "step": 4, "loss": 2.0})
    assert [x["step"] for x in read(tmp_path, "train")] == [2, 4]
    assert [x["loss"] for x in read(tmp_path, "valid")] == [2.0]


def test_resume_cuts_a_short_last_interval(tmp_path):
    """The line of an interval that the run's end cut short is not kept: the resumed run writes the whole one."""
    (tmp_path / METRICS).write_text("".join(json.dumps({"kind": "train", "step": s}) + "\n" for s in (3, 4)))
    with Metrics(tmp_path, False, 3, 4):
        pass
    assert [x["step"] for x in read(tmp_path, "train")] == [3]


def test_tensorboard(tmp_path):
    with Metrics(tmp_path, True, 1) as metrics:
        metrics.write({"kind": "train", "step": 1, "loss": 3.0})
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("line", [b"\xff{broken", b"[1]", b"{}", b'{"step": "x"}', b'{"kind": "train", "st'])
def test_a_damaged_line_is_named_and_nothing_is_changed(tmp_path, line):
    raw = b'{"kind": "train", "step": 1}\n' + line + b'\n{"kind": "train", "step": 3}\nhalf'
    (tmp_path / METRICS).write_bytes(raw)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is damaged: it is not a line that a run wrote\. Take the line out, or move"):
        Metrics(tmp_path, False, 1, 3)
    assert (tmp_path / METRICS).read_bytes() == raw


def test_text_with_other_line_ends_stays_one_line(tmp_path):
    text = "a\u2028b\u0085c\x0cd\r\n"
    with Metrics(tmp_path, False, 1) as metrics:
        metrics.write({"kind": "sample", "step": 1, "prompt": "", "text": text})
    with Metrics(tmp_path, False, 1, 2):
        pass
    assert [line["text"] for line in read(tmp_path, "sample")] == [text]


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = r"Cannot write .*metrics\.jsonl: the disk has .* free\. Free some space, or use another folder"
    with pytest.raises(OSError, match=said), Metrics(tmp_path, False, 1) as metrics:
        metrics.write({"kind": "train", "step": 1})


def test_tensorboard_does_not_bring_torch(tmp_path: Path) -> None:
    """Its import takes seconds where torch is installed."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from meshloom.train.metrics import Metrics\n"
        f"with Metrics(Path({str(tmp_path)!r}), True, 1): pass\n"
        "sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))\n"
    )
    source = str(Path(__file__).parents[2] / "src")
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}, timeout=300).returncode == 0
    assert list((tmp_path / "tensorboard").iterdir())


def test_routers_are_added_up_and_survive_a_resume():
    """Two layers of three experts: shares of each layer's assignments, dropped ones apart."""
    first, second = ({"load": jnp.asarray(a, jnp.float32), "balance": jnp.float32(b), "router_z": jnp.float32(2.0)} for a, b in LOADS)
    interval = Interval(2)
    interval.push(1, told(1.0, 4) | first)
    interval.read()
    again = Interval(2, json.loads(json.dumps(interval.state)))
    again.push(2, told(1.0, 4) | second)
    line = again.read()
    assert line is not None and line.routers is not None
    assert line.routers.load == [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]] and line.routers.busiest == 3
    assert line.routers.dropped == pytest.approx(2 / 16) and line.routers.balance == pytest.approx(24 / 16)
    assert line.tree()["load"] == line.routers.load


LOADS = (([[4, 0, 0, 1], [0, 4, 0, 0]], 8.0), ([[0, 2, 2, 0], [0, 4, 0, 1]], 16.0))
