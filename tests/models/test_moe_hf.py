"""Config.json of Mixtral and Qwen3-MoE both ways; each expert's tensor is that expert's, in both forms of a checkpoint."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from goldens import small
from meshloom.core.spec import abstract
from meshloom.core.tree import map_named, named_leaves
from meshloom.models.moe import MODEL
from meshloom.weights.hf import open_folder, save
from meshloom.weights.load import load

NAMES = small.names("moe")


@pytest.mark.parametrize("name", NAMES)
def test_both_schemas_say_the_same_and_survive_writing(name: str) -> None:
    c = MODEL.from_hf(small.said(name))
    assert MODEL.from_hf(small.said(name, old=True)) == c == MODEL.from_hf(MODEL.to_hf(c, True)) == MODEL.from_hf(MODEL.to_hf(c, False))


@pytest.mark.parametrize("name", NAMES)
def test_bits_come_back(name: str, tmp_path) -> None:
    source = small.source(name)
    save(tmp_path / "out", source.model, source.config, load(source).weights, dtype="bfloat16", said=source.said)
    before, after = (load_file(folder / "model.safetensors") for folder in (small.FOLDER / name, tmp_path / "out"))
    assert before.keys() == after.keys() and all(before[n].tobytes() == after[n].tobytes() for n in before)


@pytest.mark.parametrize("name", NAMES)
def test_each_experts_tensor_is_that_experts(name: str, tmp_path) -> None:
    source = small.source(name)

    def one(path, s):
        if "mlp" not in path or "expert" not in {**named_axes}[path]:
            return np.zeros(s.shape, np.float32)
        layers, experts = s.shape[:2]
        number = 100 * np.arange(layers)[:, None] + np.arange(experts)
        return np.broadcast_to(number[(...,) + (None,) * (len(s.shape) - 2)], s.shape).astype(np.float32)

    specs = source.model.specs(source.config)
    named_axes = {path: s.axes for path, s in named_leaves(specs, lambda s: hasattr(s, "axes")).items()}
    save(tmp_path / "out", source.model, source.config, map_named(one, abstract(specs)))
    sparse = [i for i, has in enumerate(source.config.sparse) if has]
    seen = 0
    for tensor, value in load_file(tmp_path / "out" / "model.safetensors").items():
        parts = tensor.split(".")
        if "experts" in parts:
            layer, expert = int(parts[2]), int(parts[parts.index("experts") + 1])
            assert (value == 100 * sparse.index(layer) + expert).all(), tensor
            seen += 1
    assert seen == 3 * len(sparse) * source.config.experts


@pytest.mark.parametrize("name", NAMES)
def test_joined_experts_are_read_too(name: str, tmp_path) -> None:
    """As `transformers` 5 has them in memory: gate above up, all experts in one tensor."""
    source, folder = small.source(name), small.FOLDER / name
    tensors, c = load_file(folder / "model.safetensors"), source.config
    names = ("w1", "w3", "w2") if c.variant == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    joined = {n: t for n, t in tensors.items() if ".experts." not in n}
    joined = {n.replace("block_sparse_moe.", "mlp."): t for n, t in joined.items()}
    inside = "block_sparse_moe" if c.variant == "mixtral" else "mlp"
    for layer in (i for i, has in enumerate(c.sparse) if has):
        of = lambda which, layer=layer: [tensors[f"model.layers.{layer}.{inside}.experts.{e}.{which}.weight"] for e in range(c.experts)]
        at = f"model.layers.{layer}.mlp.experts."
        gate, up, down = map(of, names)
        joined[at + "gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up)])
        joined[at + "down_proj"] = np.stack(down)
    save_file(joined, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(small.said(name)))
    other = load(open_folder(tmp_path)).weights
    for path, a in named_leaves(load(source).weights).items():
        np.testing.assert_array_equal(a, named_leaves(other)[path], path)


def test_absent_keys_mean_what_transformers_means() -> None:
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8)
    mixtral = MODEL.from_hf({"model_type": "mixtral", **sizes})
    assert (mixtral.experts, mixtral.top, mixtral.kv_heads, mixtral.rope.theta, mixtral.expert_ffn) == (8, 2, 8, 1e6, 96)
    qwen = MODEL.from_hf({"model_type": "qwen3_moe", **sizes, "num_local_experts": 16, "mlp_only_layers": [0], "decoder_sparse_step": 2})
    assert (qwen.experts, qwen.top, qwen.normalize, qwen.window, qwen.sparse) == (16, 8, False, None, (False, True, False, True))


def test_what_is_not_implemented_is_refused() -> None:
    with pytest.raises(ValueError, match="router_jitter_noise = 0.1, and only 0 or None is implemented"):
        MODEL.from_hf({**small.said("moe_mixtral"), "router_jitter_noise": 0.1})
