"""The Llama line's config.json, both ways and in both schemas."""

import pytest

from goldens import small
from meshloom.models.llama import MODEL

NAMES = small.names("llama", "mistral", "qwen", "smollm")


@pytest.mark.parametrize("name", NAMES)
def test_both_schemas_say_the_same_and_survive_writing(name: str) -> None:
    c = MODEL.from_hf(small.said(name))
    assert MODEL.from_hf(small.said(name, old=True)) == c
    assert MODEL.from_hf(MODEL.to_hf(c, True)) == c
    assert MODEL.from_hf(MODEL.to_hf(c, False)) == c


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_was_said(name: str, old: bool) -> None:
    said = small.said(name, old)
    written = MODEL.to_hf(MODEL.from_hf(said), old)
    differs = {key: (written[key], said.get(key)) for key in written if written[key] != said.get(key)}
    # a scaling's kind is written by its newer key; lists that follow from other keys may be left out
    for key in ("rope_scaling", "head_dim", "no_rope_layer_interval", "max_window_layers", "layer_types"):
        differs.pop(key, None)
    assert not differs


def test_absent_keys_mean_what_transformers_means() -> None:
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=8)
    smollm3 = MODEL.from_hf({"model_type": "smollm3", **sizes})
    assert smollm3.rotary_layers == (True, True, True, False) * 2 and smollm3.tied and smollm3.rope.theta == 2e6
    assert MODEL.from_hf({"model_type": "mistral", **sizes}).window == 4096
    assert MODEL.from_hf({"model_type": "llama", **sizes}).kv_heads == 8
    qwen = MODEL.from_hf({"model_type": "qwen2", **sizes, "num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 6})
    assert qwen.windowed_layers == (False,) * 6 + (True,) * 2


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("llama", dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
        ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)), "Partial rotary positions"),
        ("mistral", dict(layer_types=["sliding_attention", "full_attention"]), "layer_types differ"),
        ("llama", dict(num_key_value_heads=3), "cannot share 3 key/value heads"),
    ],
)
def test_what_is_not_implemented_is_refused(name: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODEL.from_hf({**small.said(name), **change})
