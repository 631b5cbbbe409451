"""Predicted against measured steps on simulated devices: predictions are made anew from the calibration beside the measurements."""

import json
import sys
from pathlib import Path

import pytest
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import plan_time as bench

DATA = json.loads(bench.DATA.read_text())


def test_what_was_measured_is_what_the_command_measures():
    jobs = [bench.Job(**{name: step[name] for name in bench.Job._fields}) for step in DATA["steps"]]
    assert set(jobs) <= set(bench.JOBS) and len(jobs) >= 8
    assert all(step["seconds"] == pytest.approx(min(step["each"]), abs=1e-4) for step in DATA["steps"])


def test_the_page_says_what_the_data_say():
    """Rank correlation and errors, good or not."""
    page = (Path(__file__).parents[2] / "docs" / "plan_time.md").read_text()
    assert bench.text(DATA).strip() in page, "run: python benchmarks/plan_time.py, and put its output into docs/plan_time.md"


def test_layouts_rank_as_measured():
    """Twenty layouts, by model; docs/plan_time.md says what stands out."""
    found = bench.summary(DATA)
    assert found["experts"]["layouts"] == 8 and found["experts"]["rank correlation"] >= 0.8
    assert found["dense"]["layouts"] == 12 and found["dense"]["rank correlation"] >= 0.75


def test_pipelines_rank_behind_the_rest_as_measured():
    """Of what differs by more than single steps on a busy machine vary: the deepest pipeline with few micro-batches takes longest."""
    found = bench.rows(DATA)
    assert max(found, key=lambda row: row[1])[0] == max(found, key=lambda row: row[2])[0] == bench.Job("dense", "pipe=8", 4)


@pytest.mark.parametrize(
    "a, b", [([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0]), ([5.0, 1.0, 2.0], [3.0, 2.0, 1.0]), ([1.0, 2.0], [1.0, 2.0])]
)
def test_the_correlation_is_scipys(a, b):
    assert bench.spearman(a, b) == pytest.approx(spearmanr(a, b)[0])
