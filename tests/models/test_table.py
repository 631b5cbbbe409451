"""Which family a model_type is."""

import pytest

from goldens import small
from meshloom.models.table import HF_TYPES, MODELS, find


def test_every_golden_model_type_is_found() -> None:
    kinds = {small.said(name)["model_type"] for name in small.names()}
    assert kinds == set(HF_TYPES)
    assert {find({"model_type": kind}).name for kind in kinds} == set(MODELS)


def test_an_unknown_model_type_lists_the_nearest_first() -> None:
    with pytest.raises(ValueError, match=r"model_type 'qwen4' is not implemented. These are: qwen[23], qwen[23], "):
        find({"model_type": "qwen4"})
    with pytest.raises(ValueError, match="no model_type"):
        find({})
