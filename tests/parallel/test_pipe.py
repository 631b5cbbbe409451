"""The strategy of pipelines: what it splits, and what it refuses."""

import pytest

from meshloom.parallel.base import PLACES
from meshloom.parallel.pipe import PIPELINE, chunks_in, fits, layers_in, schedule_in, skips
from meshloom.parallel.table import build, parse, spell
from meshloom.plan.cost import shapes, step_cost
from meshloom.runner.run import How
from programs import config


def test_layers_at_rest_are_in_their_order() -> None:
    """Between steps every stage has a part of all layers, so that a checkpoint knows nothing of stages."""
    lay = build("pipe=2 zero1=2 tensor=2", config("llama")[1], 16)
    assert lay.entries("rest", ("layer", "embed", "ffn")) == [(), ("zero1", "pipe"), ("tensor",)]
    assert lay.entries("step", ("layer", "embed", "ffn")) == [("pipe",), (), ("tensor",)]
    assert lay.entries("rest", ("vocab", "embed")) == [("tensor", "pipe"), ("zero1",)]
    assert lay.gathered("rest", "grad", ("layer", "embed", "ffn")) == (1, ("zero1",)) and lay.exchanged(("layer", "embed", "ffn")) == 1
    assert lay.exchanged(("layer", "embed")) is None and lay.exchanged(("vocab", "embed")) is None
    assert lay.stages == 2 and lay.within.stages == 1 and lay.within.acts["vocab"] == ("tensor",)


@pytest.mark.parametrize("spelling", ["pipe=2", "pipe=4:gpipe", "pipe=2:interleaved2", "pipe=2:interleaved5", "pipe=4:zb", "pipe=2:zb,3+4"])
def test_spellings(spelling) -> None:
    assert spell(parse(spelling)) == spelling


@pytest.mark.parametrize(
    "spelling, said",
    [
        ("pipe=4", "The model has 2 layers, and 4 stages take 4: each part has one at least. Use 2 stages at most"),
        ("pipe=2:interleaved2", "2 stages of 2 chunks take 4: .*Use 1 stage at most, or a schedule with fewer chunks"),
        ("pipe=2:gpipe,1f1b", "one schedule, and gpipe and 1f1b are asked for"),
        ("pipe=2:1f2b", "Did you mean '1f1b'"),
        ("pipe=2:1+1,2+0", r"one split of its layers, and 1\+1 and 2\+0 are asked for"),
        ("pipe=2:1+1+1", r"'1\+1\+1' gives the layers of 3 parts, and there are 2 stages. Give 2 numbers, such as 1\+1"),
        ("pipe=2:2+0", r"'2\+0' gives a stage no layer; each has one at least. Write 1\+1"),
        ("pipe=2:1f1b,2+1", r"'2\+1' is 3 layers, and the model has 2. Let the numbers add up to that, such as 1\+1"),
    ],
)
def test_refused(spelling, said) -> None:
    with pytest.raises(ValueError, match=said):
        build(spelling, config("llama")[1], 16)


def test_stated_layers_are_of_parts_in_the_order_of_the_model() -> None:
    c = config("llama", layers=7)[1]
    assert layers_in(build("pipe=2:interleaved2,1+3+2+1", c, 16)) == (1, 3, 2, 1) and layers_in(build("pipe=2", c, 16)) == ()
    with pytest.raises(ValueError, match=r"2 stages of 2 chunks are 4 parts. Give 4 numbers, such as 2\+2\+2\+1"):
        build("pipe=2:interleaved2,3+4", c, 16)
    said = PIPELINE.does(("1f1b", "3+4", "interleaved4", "mine.csv"))
    assert said[2:] == [
        "3+4: layers of each part, in the order of the model",
        f"interleaved4: {PIPELINE.options['interleaved2']}",
        "mine.csv: a table of your own",
    ]


@pytest.mark.parametrize(
    "spelling, said",
    [
        ("pipe=2:skip tensor=2", "a layer moves something over tensor, in which the devices of all stages keep step. Leave 'skip' out"),
        ("pipe=2:skip zero3=2", "a layer moves something over zero3"),
        ("pipe=2:skip zero2=2", "a layer moves something over zero2"),
        ("pipe=2:skip context=2", "a layer moves something over context"),
        ("pipe=2:skip,stash", "'stash' keeps what every slot's backward pass needs. Use one of them"),
    ],
)
def test_skips_only_what_moves_nothing(spelling, said) -> None:
    with pytest.raises(ValueError, match=said):
        build(spelling, config("llama")[1], 16)
    assert skips(build("pipe=2:zb,skip,1+1 data=2 zero1=2", config("llama")[1], 16)) and not skips(build("pipe=2", config("llama")[1], 16))


def test_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="384 rows .*5 stages.*model.vocab_multiple to a multiple of 5"):
        build("pipe=5", config("llama", layers=5)[1], 16)
    with pytest.raises(ValueError, match="embed 32 cannot be split over 3 stages. Use one of 1, 2, 4"):
        build("pipe=3", config("llama", layers=3)[1], 16)


@pytest.mark.parametrize(
    "layers, stages, chunks, said",
    [
        (4, 8, 1, r"The model has 4 layers, and 8 stages take 8: each part has one at least. Use 4 stages at most, or a deeper model."),
        (6, 4, 4, r"4 stages of 4 chunks take 16: each part has one at least. Use 1 stage at most, or a schedule with fewer chunks."),
        (3, 2, 4, r"2 stages of 4 chunks take 8: each part has one at least. Use 3 chunks at most, or a schedule with fewer chunks."),
    ],
)
def test_refuses_more_parts_than_layers(layers: int, stages: int, chunks: int, said: str) -> None:
    fits(layers, layers // chunks or 1, min(chunks, layers))
    with pytest.raises(ValueError, match=said):
        fits(layers, stages, chunks)


def test_a_table_of_the_users_own(tmp_path) -> None:
    """One operation a tick, as a hand would draw 1F1B of 2 stages and 2 micro-batches."""
    file = tmp_path / "mine.csv"
    file.write_text("F0,F1,,B0,,B1\n,F0,B0,F1,B1,\n")
    lay = build(f"pipe=2:{file}", config("llama")[1], 16)
    assert schedule_in(lay, 2).ticks == 6 and chunks_in(lay) == 1
    with pytest.raises(ValueError, match="of 2 micro-batches, and the batch is cut into 4. Set batch.micro_batches to 2"):
        schedule_in(lay, 4)
    with pytest.raises(ValueError, match="has 2 rows, one a stage, and the layout 4 stages"):
        build(f"pipe=4:{file}", config("llama", layers=4)[1], 16)
    file.write_text("F0,F1,B0,B1\n,F0,B0,F1\n")
    with pytest.raises(ValueError, match="stage 1 never does B1"):
        build(f"pipe=2:{file}", config("llama")[1], 16)
    with pytest.raises((ValueError, OSError), match="nowhere.csv"):
        build("pipe=2:nowhere.csv", config("llama")[1], 16)


def test_a_plain_pipeline_by_hand() -> None:
    """Two stages of two layers, four micro-batches of 4 rows of 16 tokens of 32 numbers, 1F1B: 5 ticks with a forward and 5 with a backward."""
    model, c = config("llama_plain", layers=4)
    x = shapes(model, c, build("pipe=2", c, 16), 16, 16, 4, How(), "bfloat16")
    size = 4 * 16 * 32 * 2
    matrices = 4 * (4 * 32 * 32 + 3 * 32 * 48) // 2  # of all layers, on one device; two gains a layer, and one behind the last
    assert {(m.kind, m.place, m.why): (m.count, m.bytes) for m in step_cost("pipe=2", x)} == {
        ("all-to-all", "start", "layers, to their stages"): (7, 2 * matrices),
        ("all-to-all", "end", "gradients of layers, back"): (7, 4 * matrices),
        ("all-reduce", "end", "gradients of small arrays"): (2, 4 * 4 * 2 * 32),
        ("collective-permute", "send", "activations, to the next stage"): (5, 5 * size),
        ("collective-permute", "send back", "their gradients, to the stage before"): (5, 5 * size),
        ("all-reduce", "embed", "the embedding"): (4, 4 * size),
        ("all-reduce", "head", "the last stage's activations, to all"): (4, 4 * size),
        ("all-reduce", "head back", "the head, backward"): (4, 4 * size),
        ("all-reduce", "embed back", "the first stage's gradients, to all"): (4, 4 * size),
        ("all-reduce", "head", "the loss: largest logit"): (4, 4 * 64 * 4),
        ("all-reduce", "head", "the loss: sum of exponentials, target's logit"): (4, 4 * 64 * 8),
        ("all-reduce", "norm", "the gradient's norm"): (1, 4),
    }


@pytest.mark.parametrize("schedule, forward, backward", [("gpipe", 7, 7), ("1f1b", 7, 7), ("1f1b,stash", 7, 0), ("interleaved2", 11, 11)])
def test_layers_move_what_they_do_in_every_tick(schedule: str, forward: int, backward: int) -> None:
    """Four stages, four micro-batches, tensor parallelism: two sums a layer forward, again in each tick with a backward, and two backward."""
    model, c = config("llama_plain", layers=16)
    spelling = f"pipe=4:{schedule} tensor=2"
    x = shapes(model, c, build(spelling, c, 16), 16, 16, 4, How(), "bfloat16")
    slots = 16 // x.parts
    count = {place: sum(m.count for m in step_cost(spelling, x) if m.axes == ("tensor",) and m.place == place) for place in PLACES}
    assert count["layer"] + count["layer end"] == 2 * slots * (forward + backward) and count["layer back"] == 2 * slots * (backward or 7)


def test_a_micro_batch_enters_and_leaves_once_whatever_the_ticks() -> None:
    model, c = config("gpt2", layers=8)
    for schedule in ("gpipe", "1f1b", "interleaved2", "zb"):
        spelling = f"pipe=4:{schedule}" if schedule != "interleaved2" else "pipe=2:interleaved2"
        x = shapes(model, c, build(spelling, c, 16, "gpu"), 16, 32, 8, How(), "bfloat16")
        ends = [m for m in step_cost(spelling, x) if m.place in ("embed", "head", "head back", "embed back")]
        assert {m.count for m in ends} == {8}


def test_gradients_that_are_put_off_leave_in_their_own_ticks() -> None:
    model, c = config("llama_plain", layers=4)
    x = shapes(model, c, build("pipe=2:zb zero2=2", c, 16), 16, 16, 4, How(), "bfloat16")
    assert x.flow and x.flow.ticks == (5, 5, 4, 5, 4)
    count = {m.place: m.count for m in step_cost("pipe=2:zb zero2=2", x) if m.kind == "reduce-scatter"}
    assert (count["gradients"], count["gradients late"]) == (5 * 2 * 2, 4 * 2 * 7), "gains at once, seven matrices later"
