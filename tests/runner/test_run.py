"""The loop over layers: runners and remats compute the same, keep what they say, and hold no weight twice."""

import pytest

from meshloom.models.base import Kind
from meshloom.runner.run import Stack, stacks
from programs import config, gradient, same

A, B = Kind(), Kind(window=8)


@pytest.mark.parametrize(
    "kinds, want",
    [
        ((A, A, A), [Stack(0, (A,), 3)]),
        ((A, B, A, B), [Stack(0, (A, B), 2)]),
        ((B, B, B, A, B, B, B, A), [Stack(0, (B, B, B, A), 2)]),
        ((A, A, B, A, A, A, A, A, A, A, A), [Stack(0, (A,), 2), Stack(2, (B,), 1), Stack(3, (A,), 8)]),
    ],
)
def test_stacks_are_repeated_units(kinds, want) -> None:
    assert stacks(kinds) == want


def test_stacks_of_a_pattern() -> None:
    assert stacks((A, B) * 4, "full 4, none 4") == [Stack(0, (A, B), 2, "full"), Stack(4, (A, B), 2)]
    assert stacks((A,) * 5, "full:2 4, none 1") == [Stack(0, (A, A), 2, "full:2"), Stack(4, (A,), 1)]
    assert stacks((A, A, B, A), "full:2") == [Stack(0, (A, A), 1, "full:2"), Stack(2, (B, A), 1, "full:2")]


@pytest.mark.parametrize("runner, remat", [("unroll", "none"), ("unroll", "full"), ("scan", "selective"), ("scan", "full")])
def test_every_row_computes_the_same(runner, remat) -> None:
    same(gradient("llama", "", 1, runner, remat), gradient("llama", "", 1))


def test_layers_of_several_kinds() -> None:
    more = (
        ("layers", 4),
        ("variant", "smollm3"),
        ("qk_norm", False),
        ("qkv_bias", False),
        ("o_bias", False),
        ("rotary_layers", (True, False, True, False)),
    )
    model, c = config("llama", **dict(more))
    assert [s.repeat for s in stacks(model.kinds(c))] == [2]
    same(gradient("llama", "zero3=2", 1, "scan", "full", more=more), gradient("llama", "", 1, "unroll", more=more))


def test_remat_keeps_less() -> None:
    more = (("layers", 6),)
    none, some, full = (gradient("llama", "", 1, "scan", remat, sequences=32, more=more).temp for remat in ("none", "selective", "full"))
    assert full < some < none and full < 0.6 * none


PATTERNS = [
    ("llama", "zero3=2", 2, "full 2, none 2", 4),
    ("gpt2", "zero3=2 tensor=2 sequence", 2, "full:2 4, selective 2", 6),
    ("llama", "pipe=2 data=2", 4, "full:2 2, none 2", 8),
]


@pytest.mark.parametrize("name, spelling, micro, remat, layers", PATTERNS)
def test_patterns_compute_the_same_and_move_what_they_say(name, spelling, micro, remat, layers) -> None:
    more = (("layers", layers),)
    got = gradient(name, spelling, micro, "scan", remat, more=more)
    same(got, gradient(name, "", 1, more=more))
    assert [line for line in got.lines if not line.equal] == [] and got.lines


def test_patterns_change_no_bit() -> None:
    more = (("layers", 4),)
    one, got = (gradient("llama", "", 1, "scan", remat, more=more) for remat in ("none", "full 2, none 2"))
    assert got.loss == one.loss and all((got.grads[name] == a).all() for name, a in one.grads.items())


def test_a_pattern_keeps_what_its_layers_keep() -> None:
    temp = lambda remat: gradient("llama", "", 1, "scan", remat, sequences=32, more=(("layers", 6),)).temp
    full, late, early, none = (temp(remat) for remat in ("full", "full 4, none 2", "full 2, none 4", "none"))
    assert full < late < early < none


def test_groups_unrolled() -> None:
    more = (("layers", 4),)
    same(gradient("llama", "", 1, "unroll", "full:2 2, none 2", more=more), gradient("llama", "", 1, more=more))


def test_refuses_a_pattern_of_other_layers() -> None:
    with pytest.raises(ValueError, match="remat 'full 1, none 2' is of 3 layers, and there are 2 layers"):
        gradient("llama", "", 1, "scan", "full 1, none 2")


def test_no_weight_is_kept_twice() -> None:
    """With one short row, weights are far more than activations: a copy of each layer's weights for the backward pass would show."""
    more = (("layers", 6), ("embed", 256), ("head", 32), ("ffn", 688))
    small = gradient("llama_plain", "", 1, "scan", "none", sequences=1, more=more)
    layers = sum(a.nbytes for name, a in small.grads.items() if name.startswith("layers"))
    assert small.temp < 0.65 * layers, (small.temp, layers)


def test_zero3_never_holds_all_layers() -> None:
    more = (("layers", 6), ("embed", 64), ("ffn", 512))
    whole, split = (gradient("llama_plain", spelling, 1, "scan", "none", more=more) for spelling in ("zero2=8", "zero3=8"))
    layers = sum(a.nbytes for name, a in split.grads.items() if name.startswith("layers"))
    assert whole.temp - split.temp > 0.5 * layers and split.temp < layers, (whole.temp, split.temp, layers)
