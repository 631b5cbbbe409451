"""Makes tests/goldens/models: small random models of `transformers` with their logits, so that parity is tested without torch.

Command: python tests/goldens/make_models.py   (transformers 5.24, torch 2.13, CPU; about a minute)

Every parameter is random, biases and norms too. Vocabulary 257, fewer key/value heads than heads, 64 tokens in each of two rows: longer than the
windows, than the original length of every rotary scaling. Weights are bfloat16; the logits are computed from them in fp32 and kept for every
fourth id at every position. config_old.json says the same as config.json in the keys of transformers 4.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "models"
SIZES = dict(vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
GROUPED = dict(SIZES, num_key_value_heads=2, intermediate_size=44)
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=None)
S, F = "sliding_attention", "full_attention"


def rope(kind: str, **values) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=5000.0, **values))


LLAMA3 = dict(factor=4.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(factor=4.0, original_max_position_embeddings=16)
QWEN3_MOE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20)
CASES = {
    "llama": ("llama", dict(GROUPED, tie_word_embeddings=False)),
    "llama_tied_biases": ("llama", dict(GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama_one_kv_head_wide": ("llama", dict(GROUPED, num_key_value_heads=1, head_dim=12, tie_word_embeddings=True)),
    "llama_linear": ("llama", dict(GROUPED, tie_word_embeddings=True, **rope("linear", factor=3.0))),
    "llama_dynamic": ("llama", dict(GROUPED, tie_word_embeddings=True, **rope("dynamic", factor=2.0)) | dict(max_position_embeddings=32)),
    "llama_llama3": ("llama", dict(GROUPED, tie_word_embeddings=True, **rope("llama3", **LLAMA3))),
    "llama_yarn": ("llama", dict(GROUPED, tie_word_embeddings=True, **rope("yarn", **YARN, beta_fast=8.0, beta_slow=0.5))),
    "llama_yarn_mscale": (
        "llama",
        dict(GROUPED, tie_word_embeddings=True, **rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.7, truncate=False)),
    ),
    "llama_yarn_factor": ("llama", dict(GROUPED, tie_word_embeddings=True, **rope("yarn", **YARN, attention_factor=1.3))),
    "mistral": ("mistral", dict(GROUPED, sliding_window=9)),
    "mistral_no_window": ("mistral", dict(GROUPED, sliding_window=None, tie_word_embeddings=True)),
    "qwen2": ("qwen2", dict(GROUPED, tie_word_embeddings=True)),
    "qwen2_windows": ("qwen2", dict(GROUPED, use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen3": ("qwen3", dict(GROUPED, head_dim=16, tie_word_embeddings=True)),
    "qwen3_windows_biases": (
        "qwen3",
        dict(GROUPED, head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=9, layer_types=[S, F]),
    ),
    "smollm3": ("smollm3", dict(GROUPED, no_rope_layers=[1, 0], **rope("yarn", **YARN))),
    "smollm3_windows": (
        "smollm3",
        dict(GROUPED, no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=9, attention_bias=True, tie_word_embeddings=False),
    ),
    "gpt2": ("gpt2", dict(SIZES)),
    "gpt2_untied_relu": ("gpt2", dict(SIZES, tie_word_embeddings=False, activation_function="relu", n_inner=44)),
    "gpt2_tanh": ("gpt2", dict(SIZES, num_hidden_layers=1, activation_function="tanh")),
    "moe_mixtral": ("mixtral", dict(GROUPED, num_local_experts=5, num_experts_per_tok=2, sliding_window=9)),
    "moe_qwen3": (
        "qwen3_moe",
        dict(GROUPED, **QWEN3_MOE, num_hidden_layers=3, head_dim=12, norm_topk_prob=True, mlp_only_layers=[1], attention_bias=True),
    ),
    "moe_qwen3_step": ("qwen3_moe", dict(GROUPED, **QWEN3_MOE, norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True)),
    "neox": (
        "gpt_neox",
        dict(SIZES, intermediate_size=44, rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.25)),
    ),
    "neox_sequential": (
        "gpt_neox",
        dict(SIZES, intermediate_size=44, use_parallel_residual=False, hidden_act="gelu_fast", tie_word_embeddings=True)
        | rope("linear", factor=3.0, partial_rotary_factor=0.5),
    ),
    "neox_no_attention_bias": (
        "gpt_neox",
        dict(SIZES, intermediate_size=44, attention_bias=False) | rope("default", partial_rotary_factor=1.0),
    ),
}
"""name -> model_type, configuration."""


def old_schema(c: dict) -> dict:
    """config.json as transformers 4 wrote it."""
    c = dict(c)
    c["torch_dtype"] = c.pop("dtype")
    c["transformers_version"] = "4.46.0"
    rope = c.pop("rope_parameters", None)
    if rope:
        kind, theta, part = rope.pop("rope_type"), rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
        neox = c["model_type"] == "gpt_neox"
        c["rotary_emb_base" if neox else "rope_theta"] = theta
        if part is not None:
            c["rotary_pct" if neox else "partial_rotary_factor"] = part
        # before 4.43 the key was "type"; linear and dynamic scaling are of that time
        c["rope_scaling"] = {"type" if kind in ("linear", "dynamic") else "rope_type": kind, **rope} if kind != "default" else None
    if c["model_type"] == "qwen3_moe":
        c["num_experts"] = c.pop("num_local_experts")
    if "max_window_layers" in c and c["layer_types"] == [F if i < c["max_window_layers"] else S for i in range(2)]:
        del c["layer_types"]
    return c


def make(name: str, kind: str, values: dict) -> None:
    """One model's folder."""
    config = transformers.AutoConfig.for_model(kind, **values, **IDS)
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.25 + (1.0 if "norm" in path or ".ln_" in path else 0.0) * path.endswith("weight"))
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = np.random.default_rng(0).integers(0, 257, (2, 64)).astype(np.int32)
    with torch.no_grad():
        # one row at a time: dynamic scaling looks at the whole batch
        logits = np.concatenate([model(torch.tensor(row[None].astype(np.int64))).logits.numpy() for row in tokens])
    np.savez(folder / "logits.npz", tokens=tokens, logits=logits[:, :, ::4].astype(np.float32))
    said = json.loads((folder / "config.json").read_text())
    (folder / "config_old.json").write_text(json.dumps(old_schema(said), indent=2) + "\n")


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    for name, (kind, values) in CASES.items():
        make(name, kind, values)
        print(name, sum(f.stat().st_size for f in (HERE / name).iterdir()))
