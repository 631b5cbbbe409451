"""A plan beside the compiled step: on simulated devices."""

import pytest

from meshloom.plan.hardware import Cluster, read
from meshloom.plan.search import search
from meshloom.plan.space import Allowed
from meshloom.recipes.compiled import compare, job_of, there
from meshloom.recipes.plan import Asked
from plan.questions import CPU, FAMILIES, question


def test_the_compiled_step_is_told_beside_the_prediction() -> None:
    q = question("llama", CPU, 4, Allowed(strategies=("zero3", "tensor"), words="zero3=2 tensor=2"))._replace(dtype="float32")
    asked = Asked("tiny", {"family": "llama", **FAMILIES["llama"]}, "fp32", q)
    one = search(q).best
    assert one
    lines = compare(asked, one)
    assert any("by the compiler" in line and "predicted" in line for line in lines) and not any("differs" in line for line in lines)
    assert job_of(asked, one).layout == "zero3=2 tensor=2" and len(there(q.cluster)) == 4


def test_where_it_cannot_be_compiled_it_says_why() -> None:
    with pytest.raises(ValueError, match="--compile cannot compile for h100: the compiler of GPUs needs one to be present"):
        there(read("h100:1x8"))
    with pytest.raises(ValueError, match="compiles for one slice, and v5p:2x2x2x2 has 2"):
        there(read("v5p:2x2x2x2"))
    with pytest.raises(ValueError, match="needs 64 CPU devices, and this process has 8. Say --devices 64"):
        there(Cluster(CPU, (1, 64)))
