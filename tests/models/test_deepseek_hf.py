"""DeepSeek's config.json both ways, tensors bit for bit, and each expert's tensor under its own name."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from goldens import small
from meshloom.models.deepseek import MODEL
from meshloom.weights.hf import save
from meshloom.weights.load import load

NAMES = small.names("deepseek")


@pytest.mark.parametrize("name", NAMES)
def test_both_schemas_say_the_same_and_survive_writing(name: str) -> None:
    c = MODEL.from_hf(small.said(name))
    assert MODEL.from_hf(small.said(name, old=True)) == c == MODEL.from_hf(MODEL.to_hf(c, True)) == MODEL.from_hf(MODEL.to_hf(c, False))


@pytest.mark.parametrize("name", NAMES)
def test_values_come_back(name: str, tmp_path) -> None:
    source = small.source(name)
    w = load(source).weights
    save(tmp_path / "out", source.model, source.config, w, said=source.said)
    before, after = (load_file(folder / "model.safetensors") for folder in (small.FOLDER / name, tmp_path / "out"))
    assert before.keys() == after.keys() and all(np.array_equal(before[n].astype(np.float32), after[n]) for n in before)
    for expert in range(source.config.experts):
        theirs = before[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(w.layers.sparse.mlp.up[1, expert], theirs.T)


def test_absent_keys_mean_what_transformers_means() -> None:
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8)
    v3 = MODEL.from_hf({"model_type": "deepseek_v3", **sizes})
    assert (v3.experts, v3.top, v3.groups, v3.top_groups, v3.scale, v3.first_dense, v3.query_rank, v3.head) == (
        256,
        8,
        8,
        4,
        2.5,
        3,
        1536,
        192,
    )
    v2 = MODEL.from_hf({"model_type": "deepseek_v2", **sizes, "num_experts_per_tok": 6, "q_lora_rank": None})
    assert (v2.experts, v2.shared, v2.groups, v2.query_rank, v2.score) == (64, 2, 1, None, "softmax")


def test_what_is_not_implemented_is_refused() -> None:
    with pytest.raises(ValueError, match="mlp_bias = True"):
        MODEL.from_hf({**small.said("deepseek_v2"), "mlp_bias": True})
