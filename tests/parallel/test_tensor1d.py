"""Tensor parallelism by its formula, counted by hand, and what it refuses."""

import pytest

from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost
from meshloom.runner.run import How
from programs import config

RESIDUAL = 4 * 16 * 32 * 4
"""Bytes of 4 rows of 16 tokens, width 32, fp32."""


@pytest.mark.parametrize("remat, again", [("none", 0), ("selective", 0), ("full", 1)])
def test_two_all_reduces_a_layer_each_way(remat, again) -> None:
    model, c = config("llama_plain", head=8)
    found = step_cost("tensor=4", shapes(model, c, build("tensor=4", c, 16), 16, 8, 2, How("scan", remat), "float32"))
    streams, cost = sum(x.bytes for x in found if x.bytes % RESIDUAL == 0), {x.why: x for x in found}
    assert streams == 2 * RESIDUAL * (c.layers * (4 + again) + 2) and all(x.kind == "all-reduce" for x in found)
    assert cost["the loss: largest logit"].bytes == 2 * 64 * 4 and cost["the loss: sum of exponentials, target's logit"].bytes == 2 * 64 * 8
    assert "gradients, once a step" not in cost, "nothing is whole in the work region"


def test_key_heads_that_do_not_divide_are_summed_once_a_step() -> None:
    model, c = config("llama")
    lay = build("tensor=4", c, 16)
    sums = {micro: step_cost("tensor=4", shapes(model, c, lay, 16, 8, micro, How(), "float32")) for micro in (1, 4)}
    found = {micro: next(x for x in cost if x.why == "gradients, once a step") for micro, cost in sums.items()}
    # k, v and their biases, q/k norms: 2 layers
    assert found[1] == found[4] and found[1].count == 6 and found[1].bytes == 4 * 2 * (2 * 32 * 2 * 8 + 2 * 2 * 8 + 2 * 8)


@pytest.mark.parametrize(
    "sizes, devices, said",
    [
        (dict(heads=6, head=4), 4, "6 heads cannot be split over tensor=4 devices. Use tensor= one of 1, 2, 3, 6"),
        (dict(ffn=50), 4, "50 ffn cannot be split over tensor=4"),
        (dict(vocab_multiple=1), 2, "257 padded vocabulary rows cannot be split over tensor=2"),
    ],
)
def test_refuses(sizes, devices, said) -> None:
    _, c = config("gpt2", **{"head": 4, **sizes})
    with pytest.raises(ValueError, match=said):
        build(f"tensor={devices}", c, 16)
