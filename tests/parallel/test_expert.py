"""Expert parallelism by its formula, counted by hand; against one device beside every other strategy; what it refuses."""

import numpy as np
import pytest

from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost
from meshloom.runner.run import How
from programs import config, gradient, same, weights

SPELLINGS = ("expert=4", "data=2 expert=2", "zero3=2 expert=2", "expert=2 tensor=2 sequence", "expert=2:folded tensor=2")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["moe", "moe_mixed"])
def test_equals_one_device_and_moves_what_the_formula_says(name: str, spelling: str) -> None:
    got = gradient(name, spelling)
    same(got, gradient(name, ""))
    assert all(line.equal for line in got.lines), [line for line in got.lines if not line.equal]


@pytest.mark.parametrize("remat", ["selective", "full"])
@pytest.mark.parametrize("name", ["moe", "moe_mixed"])
def test_what_a_remat_exchanges_again(name: str, remat: str) -> None:
    got = gradient(name, "expert=2", 2, "scan", remat)
    same(got, gradient(name, ""))
    assert all(line.equal for line in got.lines), [line for line in got.lines if not line.equal]


def test_dropless_by_hand() -> None:
    """Two layers, micro-batches of 4 rows on 2 devices, 16 tokens of width 32 each, 2 experts a token."""
    model, c = config("moe")
    cost = {x.why: x for x in step_cost("expert=2", shapes(model, c, build("expert=2", c, 16), 16, 8, 2, How(), "float32"))}
    rows, choices = 4 * 16 * 32 * 4, 4 * 16 * 2 * 4
    for why, kind, size in (
        ("tokens to the experts", "all-gather", rows),
        ("results of the experts", "reduce-scatter", rows),
        ("results of the experts, backward", "all-gather", rows),
        ("tokens to the experts, backward", "reduce-scatter", rows),
        ("their choices, backward", "reduce-scatter", choices),
    ):
        assert (cost[why].kind, cost[why].count, cost[why].bytes) == (kind, 4, 4 * size)
    assert cost["their choices"].count == 8 and cost["the routers' load"].bytes == 2 * 4 * 2 * 9


def test_experts_have_no_gradient_to_sum() -> None:
    model, c = config("moe")
    lay = build("expert=4", c, 16)
    found = {x.why: x for x in step_cost("expert=4", shapes(model, c, lay, 16, 16, 1, How(), "float32"))}
    whole = sum(a.size for path, a in _leaves().items() if path.split(".")[-1] not in ("gate", "up", "down"))
    assert found["gradients, once a step"].bytes == 4 * whole


def _leaves() -> dict[str, np.ndarray]:
    from meshloom.core.tree import named_leaves

    return named_leaves(weights("moe"))


def test_folded_experts_are_whole_and_fewer() -> None:
    model, c = config("moe")
    plain, fold = (build(s, c, 16) for s in ("expert=2 tensor=2", "expert=2:folded tensor=2"))
    up = model.specs(c).layers.sparse.mlp.up
    assert plain.shard_shape("rest", up) == (2, 4, 32, 12) and fold.shard_shape("rest", up) == (2, 2, 32, 24)
    assert fold.live["expert"] == ("expert", "tensor") and "expert_ffn" not in fold.acts


@pytest.mark.parametrize(
    "name, spelling, more, said",
    [
        ("llama", "expert=2", {}, "expert=2 splits experts, and this model has none. Use data=2 or zero3=2, or a family with experts"),
        ("moe", "expert=3", {}, "8 experts cannot be split over expert=3 devices. Use expert= one of 1, 2, 4, 8."),
        (
            "moe",
            "expert=4:folded tensor=4",
            {},
            "experts 8 cannot be split over 16 devices \\(expert=4 x tensor=4\\). Use sizes whose product is one of 1, 2, 4, 8.",
        ),
        (
            "moe",
            "tensor=8",
            dict(expert_ffn=20, kv_heads=8),
            "expert_ffn 20 cannot be split over 8 devices \\(tensor=8\\). Use sizes whose product is one of 1, 2, 4, 5, 10, 20.",
        ),
        ("moe", "expert=2:fold", {}, "'fold' in layout 'expert=2:fold' is not an option of 'expert'. Did you mean 'folded'\\?"),
    ],
)
def test_refuses(name, spelling, more, said) -> None:
    _, c = config(name, **more)
    with pytest.raises(ValueError, match=said):
        build(spelling, c, 16)
