"""The strategy of pipelines: what it splits, and what it refuses."""

import pytest

from meshloom.parallel.pipe import chunks_in, fits, schedule_in
from meshloom.parallel.table import build, parse, spell
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


@pytest.mark.parametrize("spelling", ["pipe=2", "pipe=4:gpipe", "pipe=2:interleaved2", "pipe=2:interleaved5", "pipe=4:zb"])
def test_spellings(spelling) -> None:
    assert spell(parse(spelling)) == spelling


@pytest.mark.parametrize(
    "spelling, said",
    [
        ("pipe=4", "The model has 2 layers, and 4 stages take 4: each part has one at least. Use 2 stages at most"),
        ("pipe=2:interleaved2", "2 stages of 2 chunks take 4: .*Use 1 stage at most, or a schedule with fewer chunks"),
        ("pipe=2:gpipe,1f1b", "one schedule, and gpipe and 1f1b are asked for"),
        ("pipe=2:1f2b", "Did you mean '1f1b'"),
    ],
)
def test_refused(spelling, said) -> None:
    with pytest.raises(ValueError, match=said):
        build(spelling, config("llama")[1], 16)


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
