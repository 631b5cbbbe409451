"""The Llama line against `transformers`, from saved small models."""

import pytest

from goldens import small
from meshloom.models.llama import Config


@pytest.mark.parametrize("name", small.names("llama", "mistral", "qwen", "smollm"))
def test_logits_equal_those_of_transformers_at_every_position(name: str) -> None:
    assert small.difference(name) < 1e-4


def test_a_variant_implies_what_it_always_has() -> None:
    sizes = dict(layers=1, embed=8, heads=2, vocab=11)
    assert Config(**sizes, variant="qwen3").qk_norm and Config(**sizes, variant="qwen2").qkv_bias
    assert not Config(**sizes).qkv_bias


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(qk_norm=True), "'llama' model cannot have qk_norm = True"),
        (dict(window=4), "cannot have window = 4"),
        (dict(qkv_bias=True), "cannot have qkv_bias = True"),
        (dict(variant="qwen2", qkv_bias=False), "cannot have qkv_bias = False"),
        (dict(variant="mistral", window=4, windowed_layers=(True, False)), "cannot have windowed_layers"),
        (dict(rotary_layers=(True, False)), "cannot have rotary_layers"),
        (dict(variant="smollm3", rotary_layers=(False,)), "1 entries for 2 layers"),
        (dict(rope=dict(kind="dynamic", factor=2.0, original=7)), "cannot have rope"),
    ],
)
def test_what_a_variant_cannot_say_is_refused_before_training(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(layers=2, embed=8, heads=2, vocab=11, **given)


def test_a_list_that_says_yes_for_every_layer_is_none() -> None:
    assert Config(layers=2, embed=8, heads=2, vocab=11, variant="smollm3", rotary_layers=(True, True)).rotary_layers == ()


def test_rotary_positions_turn_pairs():
    sizes = {"layers": 2, "embed": 6, "heads": 2, "vocab": 8}
    with pytest.raises(ValueError, match="Rotary positions turn pairs of features, and each head has 3. Use an even width"):
        Config(**sizes)
    assert Config(**sizes, variant="smollm3", rotary_layers=(False, False)).head == 3


def test_a_list_of_layers_has_one_entry_for_each():
    with pytest.raises(ValueError, match="rotary_layers has 1 entries for 2 layers. Give one for each, or none."):
        Config(layers=2, embed=8, heads=2, vocab=8, variant="smollm3", rotary_layers=(True,))
