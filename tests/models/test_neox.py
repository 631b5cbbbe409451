"""The GPT-NeoX against `transformers`, from saved small models."""

import pytest

from goldens import small
from meshloom.models import neox


@pytest.mark.parametrize("name", small.names("neox"))
def test_logits_equal_those_of_transformers_at_every_position(name: str) -> None:
    assert small.difference(name) < 1e-4


def test_both_schemas_say_the_same() -> None:
    for name in small.names("neox"):
        assert neox.from_hf(small.said(name)) == neox.from_hf(small.said(name, old=True))


def test_what_hugging_face_cannot_say_is_refused() -> None:
    c = neox.Config(layers=1, embed=8, heads=2, kv_heads=1, vocab=11)
    with pytest.raises(ValueError, match="Use the llama family"):
        neox.to_hf(c, False)


def test_rotary_positions_turn_pairs():
    with pytest.raises(ValueError, match="each head has 3. Use an even width"):
        neox.Config(layers=1, embed=6, heads=2, vocab=8, rope={"partial": 1.0})
