"""The loss curve is a picture of the run's own lines."""

import json

from meshloom.train.metrics import METRICS
from meshloom.train.plot import draw


def test_draw(tmp_path):
    lines = [{"kind": "train", "step": s, "loss": 9.0 / s, "lr": 1e-3} for s in range(1, 9)] + [{"kind": "valid", "step": 8, "loss": 1.3}]
    (tmp_path / METRICS).write_text("".join(json.dumps(x) + "\n" for x in lines))
    path = draw(tmp_path)
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n" and len(raw) > 5000
    assert [p.name for p in tmp_path.glob("*.png")] == ["loss.png"], "no temporary file stays"


def test_draw_a_run_without_lines(tmp_path):
    (tmp_path / METRICS).write_text("")
    assert draw(tmp_path).exists()
