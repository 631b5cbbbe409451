"""Which family a model_type is."""

import pytest

from goldens import small
from meshloom.core.spec import ZEROS, is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.table import HF_TYPES, MODELS, find
from programs import FAMILIES, config


def test_every_golden_model_type_is_found() -> None:
    kinds = {small.said(name)["model_type"] for name in small.names()}
    assert kinds == set(HF_TYPES)
    assert {find({"model_type": kind}).name for kind in kinds} == set(MODELS)


def test_an_unknown_model_type_lists_the_nearest_first() -> None:
    with pytest.raises(ValueError, match=r"model_type 'qwen4' is not implemented. These are: qwen[23], qwen[23], "):
        find({"model_type": "qwen4"})
    with pytest.raises(ValueError, match="no model_type"):
        find({})


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_only_added_says_so(name: str) -> None:
    """Biases start at zero, and nothing else does; a layer of each stack has one last bias in each half, or none."""
    model, c = config(name)
    specs = named_leaves(model.specs(c), is_spec)
    assert {path for path, s in specs.items() if s.role != "factor" and "norm" not in s.role} == {
        path for path, s in specs.items() if s.init == ZEROS
    }
    last = [(s.role, "dense" in path.split(".")[:2]) for path, s in specs.items() if s.role.startswith("ends")]
    assert len(last) == len(set(last))
