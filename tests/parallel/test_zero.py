"""ZeRO's three stages by their formula, counted by hand, and what they refuse."""

import pytest

from meshloom.parallel.base import wherever
from meshloom.parallel.table import build
from meshloom.parallel.zero import strategy
from meshloom.plan.cost import shapes, step_cost
from meshloom.plan.verify import NEAR
from meshloom.runner.run import How
from programs import config

# parameters with an embed axis: 7 matrices and 2 gains in each of 2 layers, embedding of 384 rows, last gain
LAYER = 4 * 32 * 8 * 8 + 3 * 32 * 48 + 2 * 32
OUTER = 384 * 32 + 32
KINDS = {
    # stage: (gathers, their elements, scatters, their elements) for m micro-batches
    1: lambda m: (11, 2 * LAYER + OUTER, 11, 2 * LAYER + OUTER),
    2: lambda m: (11, 2 * LAYER + OUTER, m * 20, m * (2 * LAYER + OUTER)),
    3: lambda m: (m * 38, m * (4 * LAYER + OUTER), m * 20, m * (2 * LAYER + OUTER)),
}


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("stage", KINDS)
def test_gathers_and_scatters(stage, micro) -> None:
    model, c = config("llama_plain", head=8)
    lay = build(f"zero{stage}=2", c, 16)
    cost = step_cost(f"zero{stage}=2", shapes(model, c, lay, 16, 8, micro, How(), "float32"))
    count = lambda kind: tuple(sum(getattr(x, part) for x in cost if x.kind == kind) for part in ("count", "bytes"))
    gathers, gathered, scatters, scattered = KINDS[stage](micro)
    assert count("all-gather") == (gathers, 4 * gathered) and count("reduce-scatter") == (scatters, 4 * scattered)
    # nothing here lacks an embed axis: sums for the log, and one number for the norm
    assert count("all-reduce") == (5, 20)


def bytes_of(spelling, micro=1, dtype="float32"):
    """(kind, mesh axes, reason) -> bytes of one step of a plain llama."""
    model, c = config("llama_plain", head=8)
    cost = step_cost(spelling, shapes(model, c, build(spelling, c, 16), 16, 8 * micro, micro, How(), dtype))
    return {(x.kind, x.axes, x.why): x.bytes for x in wherever(cost) if x.bytes > 100}


@pytest.mark.parametrize("micro", [1, 4])
def test_the_outer_stage_moves_once_a_step(micro) -> None:
    whole, often = 4 * (2 * LAYER + OUTER), "every micro-batch"
    moved = bytes_of("zero1=2 zero3=4", micro)
    assert moved == {
        # what one group of four does not have of the other's share of its own shard
        ("all-gather", ("zero1",), "parameters, once a step"): whole // 4,
        ("reduce-scatter", ("zero1",), "gradients, once a step"): whole // 4,
        ("all-gather", ("zero3",), f"parameters, {often}"): micro * whole,
        ("all-gather", ("zero3",), f"parameters, {often}, backward"): micro * 8 * LAYER,
        ("reduce-scatter", ("zero3",), f"gradients, {often}"): micro * whole,
    }
    assert bytes_of("zero1=2 zero2=4", micro) == {
        ("all-gather", ("zero1",), "parameters, once a step"): whole // 4,
        ("all-gather", ("zero2",), "parameters, once a step"): whole,
        ("reduce-scatter", ("zero1",), "gradients, once a step"): whole // 4,
        ("reduce-scatter", ("zero2",), f"gradients, {often}"): micro * whole,
    }
    assert bytes_of("data=2 zero3=4", micro)["all-reduce", ("data",), "gradients, once a step"] == whole // 4


def test_blocks_move_a_number_in_a_byte_or_half() -> None:
    """Shards of a layer's matrices: 4 of 32 x 64 and 3 of 32 x 48 numbers over 4 devices; the embedding of 384 x 32; gains as they are."""
    gains, matrices, table = 4 * 2 * 32, (*[32 * 64 // 4] * 4, *[32 * 48 // 4] * 3), 384 * 32 // 4
    eight = lambda n: n + 4 * -(-n // 256) if n % 256 == 0 else 256 * -(-n // 256) + 4 * -(-n // 256)
    four = lambda n: -(-n // 256) * (128 + 4)
    moved = bytes_of("zero3=4:qw8,qg4", dtype="bfloat16")
    layer = 4 * sum(eight(n) for n in matrices)
    assert moved["all-gather", ("zero3",), "parameters, every micro-batch"] == 2 * layer + 4 * eight(table) + 2 * gains // 2 + 2 * 32
    assert moved["all-gather", ("zero3",), "parameters, every micro-batch, backward"] == 2 * layer + gains
    assert moved["all-to-all", ("zero3",), "gradients, every micro-batch"] == 4 * (2 * sum(four(n) for n in matrices) + four(table))
    assert moved["reduce-scatter", ("zero3",), "gradients, every micro-batch"] == gains + 2 * 32


def test_refuses_two_widths_of_one_gradient() -> None:
    with pytest.raises(ValueError, match="Options qg8, qg4 give one gradient two widths. Choose qg8 or qg4"):
        build("zero3=2:qg8,qg4", config("gpt2")[1], 16)


def test_options_that_round_say_how_far() -> None:
    for stage in (1, 2, 3):
        assert set(strategy(stage).options) == set(strategy(stage).apart) and all(
            set(a) == set(NEAR) for a in strategy(stage).apart.values()
        )


def test_bf16_halves_all_but_the_scatter_of_summed_gradients() -> None:
    model, c = config("llama_plain", head=8)

    def size(stage, dtype, kind):
        lay = build(f"zero{stage}=2", c, 16)
        return sum(x.bytes for x in step_cost(f"zero{stage}=2", shapes(model, c, lay, 16, 8, 1, How(), dtype)) if x.kind == kind)

    assert size(1, "bfloat16", "all-gather") * 2 == size(1, "float32", "all-gather")
    assert size(1, "bfloat16", "reduce-scatter") == size(1, "float32", "reduce-scatter")
    assert size(3, "bfloat16", "reduce-scatter") * 2 == size(3, "float32", "reduce-scatter")


def test_refuses_a_width_that_does_not_divide() -> None:
    _, c = config("gpt2", embed=24, heads=4)
    with pytest.raises(
        ValueError, match="ZeRO splits parameters along embed, and embed 24 cannot be split over 16 devices.*Use one of 1, 2, 3, 4"
    ):
        build("zero2=16", c, 16)
