"""DeepSeek against `transformers`, from saved small models; beside tensor and expert parallelism; what is refused."""

import pytest

from goldens import small
from meshloom.models.deepseek import Config
from programs import gradient, same

SIZES = dict(layers=3, embed=8, heads=2, vocab=16, experts=4, top=2, expert_ffn=6, key_rank=6, nope_head=4, rope_head=2, value_head=4)


@pytest.mark.parametrize("name", small.names("deepseek"))
def test_logits_equal_those_of_transformers_at_every_position(name: str) -> None:
    assert small.difference(name) < 1e-4


@pytest.mark.parametrize("spelling", ["expert=2 tensor=2", "zero3=2 expert=2"])
def test_equals_one_device_and_moves_what_the_formula_says(spelling: str) -> None:
    got = gradient("deepseek", spelling)
    same(got, gradient("deepseek", ""))
    assert all(line.equal for line in got.lines), [line for line in got.lines if not line.equal]


def test_what_a_variant_implies() -> None:
    v3, v2 = Config(**SIZES, first_dense=1), Config(**SIZES, variant="deepseek_v2")
    assert (v3.score, v3.bias, v3.head, v3.sparse) == ("sigmoid", True, 6, (False, True, True))
    assert (v2.score, v2.bias, v2.normalize, v2.sparse) == ("softmax", False, False, (True,) * 3)


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(kv_heads=1), "Latent attention makes keys for every head: 1 key heads for 2. Leave kv_heads out."),
        (dict(value_head=7), r"value_head 7 is wider than a key \(6\), which is not implemented. Use at most 6."),
        (dict(first_dense=3), "3 dense layers leave none of 3 with experts. Lower first_dense"),
        (dict(rope_head=3), "each head has 3. Use an even width"),
    ],
)
def test_refuses(more, message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SIZES, **more})
