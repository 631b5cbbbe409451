"""Steps compiled for devices that are not there: simulated ones here; TPUs in tests/benchmarks/test_tpu.py, where libtpu is."""

from importlib.util import find_spec

import jax
import pytest

from meshloom.recipes.topology import Job, devices, planned, rows, step, traffic

MODEL = {"family": "llama", "layers": 2, "embed": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 256, "max_seq": 32}
JOB = Job(MODEL, "zero3=2", 32, 8, 2, "full", "float32", "cpu")


def test_what_is_compiled_moves_what_the_formula_says() -> None:
    there = jax.devices()[:2]
    assert len(there) == 2 and all(line.equal for line in traffic(JOB, there))
    _, _, plan = planned(JOB, there)
    assert rows(JOB, plan).tokens.shape == (2, 4, 32)
    assert step(JOB, there).memory_analysis().argument_size_in_bytes > 0


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is there")
def test_without_libtpu_it_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"needs libtpu, which is not installed here: pip install 'meshloom\[tpu\]'"):
        devices("v5e:2x4")
