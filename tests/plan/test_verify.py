"""The shrunken model, the default layouts, and the tables."""

import pytest

from meshloom.models.table import MODELS
from meshloom.parallel.table import build
from meshloom.plan.cost import Line
from meshloom.plan.verify import EXPERTS, LAYOUTS, NEAR, SEQ, Row, Stored, default_layouts, limits, needs_devices, refused, shrink, tables
from programs import config


def test_keeps_what_makes_a_model_odd() -> None:
    model = MODELS["llama"]
    c = model.Config(variant="qwen2", layers=24, embed=896, heads=14, kv_heads=2, ffn=4864, vocab=151936, window=4096, max_seq=32768)
    small = shrink(model, c)
    assert (small.heads, small.kv_heads, small.qkv_bias, small.vocab_padded - small.vocab) == (14, 2, True, c.vocab_padded - c.vocab)
    assert small.layers == 2 and small.window < SEQ and small.vocab < 300 and small.embed < 128
    for n in (2, 4, 8):
        assert (small.embed % n, small.ffn % n) == (c.embed % n, c.ffn % n)


@pytest.mark.parametrize("heads, kv_heads, want", [(32, 8, (32, 8)), (96, 1, (96, 1)), (48, 48, (8, 8)), (15, 5, (3, 1)), (8, 2, (8, 2))])
def test_heads_keep_ratio_and_shares(heads, kv_heads, want) -> None:
    model, c = config("llama_plain", heads=heads, kv_heads=kv_heads, head=4, embed=64)
    assert (shrink(model, c).heads, shrink(model, c).kv_heads) == want


def test_keeps_a_pattern_of_layers() -> None:
    more = dict(variant="smollm3", qk_norm=False, qkv_bias=False, o_bias=False)
    model, c = config("llama", layers=24, rotary_layers=(True, True, True, False) * 6, **more)
    assert shrink(model, c).rotary_layers == (True, True, True, False) * 2


def test_partial_rotary_still_turns() -> None:
    model, c = config("neox", embed=512, heads=8)
    small = shrink(model, c)
    assert int(small.head * small.rope.partial) % 2 == 0 and small.head == 8 and small.parallel


def test_a_small_model_stays_as_it_is() -> None:
    model, c = config("llama", vocab=129)
    assert shrink(model, c) == c


def test_admits_what_the_model_admits() -> None:
    model, c = config("llama", embed=96, ffn=100)
    small = shrink(model, c)
    for spelling in LAYOUTS:
        said = []
        for which in (c, small):
            try:
                build(spelling, which, SEQ)
                said.append(True)
            except ValueError:
                said.append(False)
        assert said[0] == said[1], spelling


def test_experts_are_split_where_there_are_some() -> None:
    (_, dense), (_, sparse) = config("llama"), config("moe")
    assert default_layouts(dense) == LAYOUTS and default_layouts(sparse) == (*LAYOUTS, *EXPERTS)


def test_devices_that_the_layouts_need() -> None:
    assert needs_devices(()) == 8 and needs_devices(("tensor=4 sequence", "data=2 tensor=2")) == 4


def test_options_that_round_have_bounds_of_their_own() -> None:
    assert limits("data=2 zero3=4") == NEAR and limits("zero3=4:qg8")["loss"] == pytest.approx(0.01, rel=0.01)
    assert limits("zero1=2:qg4 zero3=4:qg4")["gradient"] > limits("zero3=4:qg4")["gradient"] > 100 * NEAR["gradient"]
    row = Row("zero3=4:qg8", {"loss": 2e-3, "gradient": 2e-2}, "norm", True, True, (), ())
    assert row.wrong == [] and row._replace(spelling="zero3=4").wrong == ["loss differs by 2.0e-03", "gradient differs by 2.0e-02"]


def test_tables_show_what_differs() -> None:
    from rich.console import Console

    line = Line("all-reduce", ("data", "zero"), (3, 1000), (2, 900))
    near = {"loss": 1e-7, "gradient": 1e-3, "norm": 0.0, "weights": 1e-6}
    row = Row("data=2 zero1=2", near, "norm", True, True, (Stored("params", 10, 10),), (line,))
    console = Console(width=200, record=True)
    for table in tables([row, refused("tensor=3", "8 heads cannot be split")], 5):
        console.print(table)
    text = console.export_text()
    for words in ("Against one device, 5 steps", "1.0e-03", "differs", "refused", "data x zero", "1,000", "900"):
        assert words in text
    assert row.wrong == ["gradient differs by 1.0e-03", "all-reduce over data x zero: 3 arrays, 1,000 bytes; formula 2, 900"]


def test_a_pipeline_may_need_more_layers_than_the_model_has():
    """Two layers a part are a loop, as in the models that pipelines are for; a pattern goes on in its order."""
    model = MODELS["llama"]
    c = model.Config(variant="smollm3", layers=4, embed=64, heads=4, vocab=101, rotary_layers=(True, True, True, False))
    small = shrink(model, c, 8)
    assert (small.layers, small.rotary_layers) == (8, (True, True, True, False) * 2)
    assert shrink(model, model.Config(layers=1, embed=64, heads=4, vocab=101)).layers == 1
