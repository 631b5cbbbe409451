"""Parts of a step by what their layers keep, counted by hand."""

import pytest

from meshloom.parallel.part import by_remat, restricted
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.runner.run import How
from programs import config


def of(name: str, spelling: str, layers: int, remat: str, micro: int = 1):
    model, c = config(name, layers=layers)
    return shapes(model, c, build(spelling, c, 16), 16, 8, micro, How("scan", remat), "float32")


def test_one_word_is_the_step_itself() -> None:
    x = of("llama", "", 4, "full 4")
    assert x.remat == "full" and by_remat(x) == {"full": x}


def test_parts_have_their_layers() -> None:
    parts = by_remat(of("llama", "", 5, "full 3, none 2"))
    assert {word: (part.layers, part.remat, part.leaves["layers.attn.q"].shape[0]) for word, part in parts.items()} == {
        "full": (3, "full", 3),
        "none": (2, "none", 2),
    }


def test_a_pattern_of_a_pipeline_is_of_each_part() -> None:
    parts = by_remat(of("llama", "pipe=2", 8, "full 1, none 3", 4))
    assert {word: part.layers for word, part in parts.items()} == {"full": 2, "none": 6}
    assert parts["full"].elements("live", parts["full"].leaves["layers.attn.q_norm"]) == 8
    with pytest.raises(ValueError, match="is of 8 layers, and there are 4 slots in a part of the pipeline"):
        of("llama", "pipe=2", 8, "full 4, none 4", 4)


def test_stacks_that_are_not_there_are_left_out() -> None:
    x = of("deepseek", "", 3, "none")
    dense = restricted(x, (True, False, False))
    assert {kind.stack for kind in x.run} == {"dense", "sparse"} and {kind.stack for kind in dense.run} == {"dense"}
    assert not any(path.startswith("layers.sparse.") for path in dense.leaves) and any(
        path.startswith("layers.dense.") for path in dense.leaves
    )
