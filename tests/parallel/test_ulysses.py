"""Heads in exchange for sequence in whole models: equal to one device under products, traffic by hand and in the program, refusals."""

import pytest

from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost
from meshloom.runner.run import How
from programs import config, gradient, same

PLAIN = dict(variant="qwen2", o_bias=False, qk_norm=False)
CASES = [
    # model, layout, micro-batches, runner, remat, tokens, more
    ("llama", "ulysses=2", 2, "scan", "full", 32, {}),
    ("llama", "ulysses=4", 1, "unroll", "selective", 32, {}),  # fewer key heads than devices
    ("gpt2", "ulysses=4", 2, "scan", "none", 30, {}),  # padded
    ("llama_untied", "zero3=2 ulysses=2 tensor=2 sequence", 2, "scan", "none", 32, {}),
    ("llama", "data=2 ulysses=4", 1, "scan", "none", 32, dict(PLAIN, window=5)),
    ("gpt2", "zero2=2 ulysses=2", 2, "unroll", "full", 32, dict(dropout=0.2, attention_dropout=0.3)),
]


@pytest.mark.parametrize("name, spelling, micro, runner, remat, seq, more", CASES)
def test_equals_one_device(name, spelling, micro, runner, remat, seq, more) -> None:
    given = tuple(more.items())
    got = gradient(name, spelling, micro, runner, remat, more=given, seq=seq)
    same(got, gradient(name, "", 1, more=given, seq=seq))
    assert [line for line in got.lines if not line.equal] == [] and "all-to-all" in {line.kind for line in got.lines}


def cost_of(spelling, remat="none"):
    model, c = config("llama")
    return {x.why: x for x in step_cost(spelling, shapes(model, c, build(spelling, c, 64), 64, 8, 2, How("scan", remat), "float32"))}


@pytest.mark.parametrize(
    "spelling, queries, keys, tokens",
    [("ulysses=2", 8, 2, 32), ("ulysses=8", 8, 8, 8), ("ulysses=4 tensor=2", 4, 4, 16), ("context=2 ulysses=2", 8, 2, 16)],
)
def test_traffic_by_hand(spelling, queries, keys, tokens) -> None:
    """2 micro-batches of 4 rows, 2 layers: q, k, v and the result of the device's own tokens, each way."""
    cost = cost_of(spelling)
    there, back = cost["heads for sequence"], cost["heads for sequence, backward"]
    assert there.kind == "all-to-all" and there.axes == ("ulysses",)
    assert (there.count, there.bytes) == (back.count, back.bytes) == (2 * 2 * 4, 2 * 2 * (2 * queries + 2 * keys) * 4 * tokens * 8 * 4)


def test_a_remat_exchanges_again() -> None:
    again = "heads for sequence, recomputed"
    assert again not in cost_of("ulysses=2") and cost_of("ulysses=2", "selective")[again] == cost_of("ulysses=2", "full")[again]


def test_documents_are_gathered_once_by_one_of_both() -> None:
    assert cost_of("ulysses=2")["the documents of each row"].axes == ("ulysses",)
    both = cost_of("context=2 ulysses=2")["the documents of each row"]
    assert both.axes == ("context", "ulysses") and (both.count, both.bytes) == (2, 2 * 4 * 64 * 4)


@pytest.mark.parametrize(
    "spelling, said",
    [
        (
            "ulysses=3",
            "ulysses=3 exchanges heads for sequence, and 8 heads cannot be shared by 3 devices. Use ulysses= one of 1, 2, 4, 8, and context=",
        ),
        (
            "ulysses=4 tensor=4",
            "2 heads of each of the 4 tensor devices cannot be shared by 4 devices. Use ulysses= one of 1, 2, and context=",
        ),
        ("ulysses=8:fast", "'fast' in layout 'ulysses=8:fast' is not an option of 'ulysses'. It has none"),
    ],
)
def test_refuses(spelling, said) -> None:
    with pytest.raises(ValueError, match=said):
        build(spelling, config("llama")[1], 64)


def test_refuses_short_sequences() -> None:
    with pytest.raises(
        ValueError, match="A sequence of 6 tokens is too short for ulysses=8. Use data.seq of at least 8, or ulysses=6 or fewer"
    ):
        build("ulysses=8", config("llama")[1], 6)
