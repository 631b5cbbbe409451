"""The ring in whole models: equal to one device under every product, its traffic by hand and in the program, what it refuses."""

import pytest

from meshloom.models.base import ModelConfig
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost
from meshloom.runner.run import How
from programs import config, gradient, same

PLAIN = dict(variant="qwen2", o_bias=False, qk_norm=False)
CASES = [
    # model, layout, micro-batches, runner, remat, tokens, more
    ("llama", "context=2", 2, "unroll", "none", 32, {}),
    ("llama", "context=4", 1, "scan", "full", 32, {}),
    ("llama_untied", "context=8", 1, "scan", "none", 30, {}),  # padded
    ("gpt2", "context=4", 2, "scan", "selective", 30, {}),  # padded, learned positions
    ("llama", "data=2 context=2 tensor=2 sequence", 2, "scan", "selective", 32, {}),
    ("llama", "context=2 tensor=4", 1, "scan", "none", 32, {}),  # fewer key heads than tensor devices
    ("gpt2", "zero3=2 context=2 ulysses=2", 2, "scan", "none", 32, {}),
    ("llama", "context=4", 1, "scan", "none", 64, dict(PLAIN, window=5)),  # smaller than a piece
    ("llama", "context=4", 1, "unroll", "full", 32, dict(PLAIN, window=19, windowed_layers=(True, False))),  # larger than a share
    ("llama", "context=2 ulysses=2", 1, "scan", "none", 32, dict(dropout=0.2, attention_dropout=0.3)),
]


@pytest.mark.parametrize("name, spelling, micro, runner, remat, seq, more", CASES)
def test_equals_one_device(name, spelling, micro, runner, remat, seq, more) -> None:
    given = tuple(more.items())
    got = gradient(name, spelling, micro, runner, remat, more=given, seq=seq)
    same(got, gradient(name, "", 1, more=given, seq=seq))
    assert [line for line in got.lines if not line.equal] == [] and "collective-permute" in {line.kind for line in got.lines}


def test_rows_of_one_document_need_no_segments() -> None:
    got = gradient("llama", "context=4", 1, seq=30, packed=False)
    same(got, gradient("llama", "", 1, seq=30, packed=False))
    assert [line for line in got.lines if not line.equal] == [] and "all-gather" not in {line.kind for line in got.lines}


def cost_of(spelling, remat="none", dtype="float32", **more):
    model, c = config("llama", **more)
    return {x.why: x for x in step_cost(spelling, shapes(model, c, build(spelling, c, 64), 64, 8, 2, How("scan", remat), dtype))}


@pytest.mark.parametrize("spelling, heads, tokens", [("context=4", 2, 16), ("context=4 tensor=2", 1, 16), ("context=2 ulysses=4", 1, 32)])
def test_traffic_by_hand(spelling, heads, tokens) -> None:
    """2 micro-batches of 4 rows, 2 layers, P-1 steps; keys and values un-repeated, bf16, their gradients fp32."""
    cost, hops = cost_of(spelling, dtype="bfloat16"), int(spelling[8]) - 1
    array = 4 * tokens * heads * 8
    there, back, slopes = (
        cost[why]
        for why in ("keys and values around the ring", "keys and values around the ring, backward", "their gradients around the ring")
    )
    assert there.axes == ("context",) and there.kind == "collective-permute"
    assert (there.count, there.bytes) == (back.count, back.bytes) == (2 * 2 * 2 * hops, 2 * 2 * 2 * hops * array * 2)
    assert (slopes.count, slopes.bytes) == (there.count, 2 * there.bytes)


def test_recomputing_runs_the_ring_again_under_full_alone() -> None:
    again = "keys and values around the ring, recomputed"
    assert again not in cost_of("context=4") and again not in cost_of("context=4", "selective")
    assert cost_of("context=4", "full")[again].count == 2 * 2 * 2 * 3


def test_a_window_saves_steps() -> None:
    wide, narrow = cost_of("context=8"), cost_of("context=8", **PLAIN, window=5)
    assert narrow["keys and values around the ring"].count * 7 == wide["keys and values around the ring"].count * 2


def test_parameters_are_whole_and_summed_like_those_of_other_samples() -> None:
    lay = build("context=4", config("llama")[1], 64)
    assert lay.tokens == ("context",) and not lay.rest and lay.ring == ("context",) and lay.batch == ()
    assert cost_of("context=4")["gradients, once a step"].axes == ("context",)


def test_refuses_short_sequences() -> None:
    _, c = config("llama")
    with pytest.raises(
        ValueError, match="A sequence of 6 tokens is too short for context=4: .* Use data.seq of at least 8, or context=3 or fewer"
    ):
        build("context=4", c, 6)
    assert build("context=4", c, 8)


@pytest.mark.parametrize("spelling", ["context=2", "ulysses=2"])
def test_refuses_what_mixes_tokens_otherwise(spelling) -> None:
    class Config(ModelConfig):
        """Of a family with a recurrence."""

        mixing = "recurrence"

    c = Config(layers=1, embed=16, heads=4, vocab=11)
    with pytest.raises(
        ValueError, match=rf"{spelling} splits the sequence, and this model mixes tokens by 'recurrence'.*\(attention has\)"
    ):
        build(spelling, c, 32)


def test_has_no_options() -> None:
    with pytest.raises(ValueError, match="'stripes' in layout 'context=2:stripes' is not an option of 'context'. It has none"):
        build("context=2:stripes", config("llama")[1], 32)
