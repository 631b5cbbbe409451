"""Planning a training step of a transformer of 7B's widths takes no longer than its page says."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "plan_ilp.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("plan_ilp", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layers, most", [(2, 5), (32, 60)])
def test_seconds_of_the_search(bench, layers: int, most: float) -> None:
    """Of CPU, so that other work on the machine does not count."""
    words = [w.strip() for w in bench.row(layers, "x=8", "1000GB", "a100:1x8").strip("|").split("|")]
    assert float(words[5]) < most and float(words[6].rstrip("%")) <= 0.1
    assert int(words[3].replace(",", "")) > 400 * layers
