"""Steps compiled for a TPU topology move what the formula says; skipped where libtpu is absent (it needs no TPU, and no network)."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks"
CODE = """
import json, sys
sys.path.insert(0, {bench!r})
import tpu
model = dict(family="llama", layers=2, embed=256, heads=8, kv_heads=8, ffn=512, vocab=1024, max_seq=128)
lines = tpu.traffic(tpu.Job(model, {layout!r}, 128, 16, 2), tpu.devices("v5e:2x4"))
print("ANSWER", json.dumps([[x.kind, x.axes, x.found, x.formula] for x in lines]))
"""


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'jax[tpu]'")
@pytest.mark.parametrize("layout", ["data=8", "zero2=8", "zero3=8", "zero1=2 zero3=4", "context=8", "context=4 ulysses=2"])
def test_a_tpu_program_moves_what_the_formula_says(layout: str) -> None:
    """All kinds together: for small arrays this compiler writes an all-reduce and a slice in place of a gather or a scatter."""
    code = CODE.format(bench=str(BENCH), layout=layout)
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = json.loads(done.stdout.split("ANSWER")[1])
    for i in (0, 1):
        assert sum(found[i] for _, _, found, _ in lines) == sum(formula[i] for _, _, _, formula in lines), lines
