"""Writes rope.npz: frequencies, cos and sin of every scaling as `transformers` 5.24 computes them.  Needs torch and transformers:
python tests/goldens/make_rope.py"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

HEAD = 32
CASES = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "default_theta": dict(rope_type="default", rope_theta=500000.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
    "llama3": dict(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
    "yarn_untruncated": dict(
        rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128, truncate=False, beta_fast=16.0, beta_slow=2.0
    ),
    "yarn_mscale": dict(
        rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.8
    ),
    "yarn_factor": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, attention_factor=1.3),
    "partial": dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
}


def main() -> None:
    out = {}
    x = torch.randn(1, 2, 96, HEAD, generator=torch.Generator().manual_seed(0))
    out["x"] = x.transpose(1, 2).numpy()
    for name, parameters in CASES.items():
        config = LlamaConfig(hidden_size=2 * HEAD, num_attention_heads=2, max_position_embeddings=64, rope_parameters=dict(parameters))
        rotary = LlamaRotaryEmbedding(config)
        for length in (48, 96):
            cos, sin = rotary(x, torch.arange(length)[None])
            size = cos.shape[-1]
            rot, _ = apply_rotary_pos_emb(x[:, :, :length, :size], x[:, :, :length, :size], cos, sin)
            out[f"{name}/{length}/cos"], out[f"{name}/{length}/sin"] = cos[..., : size // 2].numpy(), sin[..., : size // 2].numpy()
            out[f"{name}/{length}/y"] = torch.cat([rot, x[:, :, :length, size:]], -1).transpose(1, 2).numpy()
    np.savez_compressed(Path(__file__).with_name("rope.npz"), **out)


if __name__ == "__main__":
    main()
