"""Calibration: alpha and beta are found again in times made from them, and what is written reads as hardware."""

import io
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from meshloom.plan.cost import SENT
from meshloom.plan.hardware import read
from meshloom.plan.link import steps
from meshloom.plan.measure import KINDS, Effort, Point
from meshloom.recipes import calibrate as module
from meshloom.recipes.calibrate import calibrate, entry_of, fit, measured

TINY = Effort({"float32": (64,)}, (1 << 14,), (1 << 10, 1 << 14), 2, 1e-4, 2)
SLOWER = {"all-gather": 1.0, "reduce-scatter": 2.0, "all-reduce": 1.5, "all-to-all": 4.0, "collective-permute": 3.0}


def made(start: float, step: float, rate: float, platform: str = "gpu", groups=(2, 4, 8)) -> list[Point]:
    """Times as the model has them."""
    sent = lambda kind, n: SENT.get(kind, lambda n: (n - 1) / n)(n)
    took = lambda kind, n, size: start + step * steps(platform, n) + SLOWER[kind] * sent(kind, n) * size / rate
    return [Point(kind, n, size, took(kind, n, size)) for kind in KINDS for n in groups for size in (1, 1 << 24)]


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_alpha_and_beta_are_found_again(platform):
    start, step, rate, slower = fit(made(5e-6, 2e-6, 1e10, platform), platform)
    assert (start, step, rate) == pytest.approx((5e-6, 2e-6, 1e10), rel=1e-3)
    assert slower == pytest.approx({kind: n for kind, n in SLOWER.items() if kind != "all-gather"}, rel=1e-3)


def test_one_size_of_group_tells_no_step():
    start, step, rate, _ = fit(made(5e-6, 2e-6, 1e10, groups=(2,)), "gpu")
    assert (start, step) == pytest.approx((7e-6, 0.0), rel=1e-3) and rate == pytest.approx(1e10, rel=1e-3)


def test_one_device_moves_nothing():
    assert fit([Point("memory", 1, 8, 1.0)], "gpu")[:2] == (0.0, 0.0)


def test_a_known_device_keeps_its_peak_and_is_told_what_it_reaches(monkeypatch):
    """An H100 that multiplies at 700 TFLOP/s reads as 989 with efficiency 0.708."""
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", memory_stats=lambda: {"bytes_limit": 64 << 30})
    monkeypatch.setattr(module, "jax", SimpleNamespace(process_count=lambda: 1, local_devices=lambda: [device] * 8))
    points = [Point("products", 8, 8192, 2 * 8192**3 / 700e12, "bfloat16"), Point("memory", 8, 1 << 28, 2 * (1 << 28) / 2.68e12)]
    entry = entry_of("mine", [device] * 8, [*points, *made(5e-6, 2e-6, 3e11)])
    assert (entry["flops"]["bfloat16"], entry["efficiency"], entry["stream"]) == (989e12, pytest.approx(0.708, abs=1e-3), 0.8)
    assert (entry["memory"], entry["node"], entry["shape"], entry["platform"]) == (64 << 30, 8, "1x8", "gpu")
    assert entry["inside"]["rate"] == pytest.approx(3e11, rel=1e-3)


def test_what_is_written_is_a_cluster(tmp_path, monkeypatch, capsys):
    """On the 8 devices of the tests: the file reads back as these, sharing what was measured of the machine."""
    monkeypatch.setattr(module, "effort_of", lambda platform, quick: TINY)
    path = tmp_path / "mine.yaml"
    entry = calibrate("mine", path)
    cluster = read(str(path))
    assert cluster.label == "mine:1x8" and cluster.hardware.platform == "cpu" and cluster.hardware.shared
    assert cluster.hardware.flops["float32"] == pytest.approx(entry["flops"]["float32"] / 8)
    assert 0 < cluster.hardware.between_products == pytest.approx(entry["between_products"] / 8)
    assert set(cluster.hardware.slower) == set(KINDS) - {"all-gather"}
    told = capsys.readouterr().out
    assert all(word in told for word in ("float32 products", "memory", "us to start", "all-to-all", "Written to")), told
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"], "nothing else is left"


def test_progress_is_shown_on_a_terminal():
    out = io.StringIO()
    points = measured(jax.devices()[:1], TINY, Console(file=out, force_terminal=True))
    assert [p.what for p in points] == ["products", "memory", "between", "kernel"]
    assert "4/4" in out.getvalue()


def test_a_machine_that_cannot_be_written_to_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "effort_of", lambda platform, quick: TINY._replace(products={}, moved=()))
    monkeypatch.setattr(module, "measured", lambda *_: [Point("products", 8, 64, 1e-3, "float32"), Point("memory", 8, 1 << 14, 1e-4)])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is there already and is no hardware that was measured"):
        calibrate("mine", tmp_path / "file")
    with pytest.raises(OSError, match="Cannot write"):
        calibrate("mine", tmp_path / "file" / "mine.yaml")
