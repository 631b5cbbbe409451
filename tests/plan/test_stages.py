"""What a plan says of its pipeline: layers, idle time and bytes in flight, by hand and beside the compiler's number."""

import pytest

from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.memory import working
from meshloom.plan.stages import Pipeline, pipeline
from meshloom.recipes.launch import choose, describe_plan, explained
from meshloom.recipes.load import load_recipe
from meshloom.runner.run import How
from programs import config, gradient


def asked(spelling: str, micro: int = 8, layers: int = 8, remat: str = "none", sequences: int = 16):
    model, c = config("llama", layers=layers)
    return model, shapes(model, c, build(spelling, c, 16), 16, sequences, micro, How("scan", remat), "float32")


def found(spelling: str, *more, **given) -> Pipeline:
    """The pipeline of a layout that has one."""
    p = pipeline(*asked(spelling, *more, **given))
    assert p
    return p


def test_none_without_a_pipeline() -> None:
    assert pipeline(*asked("zero1=2")) is None


def test_layers_and_idle_time() -> None:
    """1F1B, 4 stages, 8 micro-batches: (p - 1) / (m + p - 1) of the step."""
    p = found("pipe=4")
    assert p.layers == (((0, 1),), ((2, 3),), ((4, 5),), ((6, 7),)) and p.slots == 2 and p.idle == pytest.approx(3 / 11)
    assert p.said == f"1f1b: 4 stages of 2 layers, 8 micro-batches in {p.ticks} ticks, idle 27.3% of a step"
    two = found("pipe=2:interleaved2 data=2")
    assert two.layers == (((0, 1), (4, 5)), ((2, 3), (6, 7))) and two.idle == pytest.approx(0.5 / 8.5)
    assert "2 stages x 2 chunks of 2 layers" in two.said and two.held == "stage 0: layers 0-1, 4-5; stage 1: layers 2-3, 6-7"
    assert found("pipe=8").held == "stage 0: layer 0; stage 1: layer 1; ... stage 7: layer 7"


def test_layers_that_do_not_divide_leave_slots_empty() -> None:
    p = found("pipe=4", layers=7)
    assert [len(chunks[0]) for chunks in p.layers] == [2, 2, 2, 1] and p.slots == 2
    assert p.flight.bytes == found("pipe=4").flight.bytes, "every stage computes the slots of the fullest"


def test_stated_layers() -> None:
    p = found("pipe=4:1f1b,1+3+2+1", layers=7)
    assert p.held == "stage 0: layer 0; stage 1: layers 1-3; stage 2: layers 4-5; stage 3: layer 6"
    assert p.flight.bytes == found("pipe=4", layers=12).flight.bytes, "every stage has the slots of the longest, three"


def test_a_stage_works_with_its_own_layers() -> None:
    """Weights and gradients of a quarter of the layers and of the vocabulary; of activations what is in flight and one chunk, at any number of
    micro-batches of one size."""
    one, four = (working(*asked(s)) for s in ("", "pipe=4"))
    assert four["gradients"] == pytest.approx(one["gradients"] / 4, rel=0.02) and one["weights"] == 0 < four["weights"] < four["gradients"]
    held = [working(*asked("pipe=4", m, sequences=m), found("pipe=4", m, sequences=m).flight) for m in (16, 64)]
    assert (
        all(held[0][kind] == held[1][kind] for kind in held[0] if kind != "batch")
        and held[0]["activations"] < one["activations"]
        and held[0]["in flight"] > 0
    )


@pytest.mark.parametrize("spelling, remat", [("pipe=2", "none"), ("pipe=2:interleaved2", "full"), ("pipe=2:gpipe tensor=2", "none")])
def test_the_estimate_is_near_the_compilers_number(spelling: str, remat: str) -> None:
    given = dict(layers=4, remat=remat, sequences=32)
    held = sum(working(*asked(spelling, 8, **given), found(spelling, 8, **given).flight).values())
    ratio = held / gradient("llama", spelling, 8, "scan", remat, sequences=32, more=(("layers", 4),)).temp
    assert 0.5 < ratio < 2, ratio


def test_the_plan_shows_stages_and_what_is_in_flight() -> None:
    recipe = load_recipe("quickstart-pipe", ["batch.micro_batches=8"])
    chosen = choose(recipe)
    e, text = explained(recipe, chosen), "\n".join(describe_plan(recipe, chosen))
    assert e.pipeline and e.working["in flight"] == e.pipeline.flight.bytes - e.pipeline.flight.chunk
    for said in (
        "pipeline   interleaved2: 2 stages x 2 chunks of 1 layer, 8 micro-batches in 20 ticks, idle 5.9% of a step",
        "Stages of the pipeline",
        "layers 0, 2",
        "inputs, from F to B",
        "in flight",
    ):
        assert said in text


def test_refuses_micro_batches_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="groups of 2.*The nearest that fit: 2"):
        pipeline(*asked("pipe=2:interleaved2", 1, sequences=16))
