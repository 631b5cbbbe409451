"""Writes rope.npz: frequencies, cos and sin of every scaling as `transformers` 5.24 computes them.  Needs torch and transformers:
python tests/goldens/make_rope.py"""

from pathlib import Path

import numpy as np
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

HEAD = 32
PLACES = {47: [0, 1, 7, 31, 47], 95: [0, 1, 17, 63, 95]}
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
    x = torch.randn(1, 2, 5, HEAD, generator=torch.Generator().manual_seed(0))
    out["x"] = x.transpose(1, 2).numpy()
    for name, parameters in CASES.items():
        # Llama's class ignores the fraction, GPT-NeoX's does not
        partial = "partial_rotary_factor" in parameters
        kind, embedding = (GPTNeoXConfig, GPTNeoXRotaryEmbedding) if partial else (LlamaConfig, LlamaRotaryEmbedding)
        config = kind(hidden_size=2 * HEAD, num_attention_heads=2, max_position_embeddings=64, rope_parameters=dict(parameters))
        rotary = embedding(config)
        for last in PLACES:
            cos, sin = rotary(x, torch.tensor([PLACES[last]]))
            size = cos.shape[-1]
            turned, _ = apply_rotary_pos_emb(x[..., :size], x[..., :size], cos, sin)
            out[f"{name}/{last}/cos"], out[f"{name}/{last}/sin"] = cos[..., : size // 2].numpy(), sin[..., : size // 2].numpy()
            out[f"{name}/{last}/y"] = torch.cat([turned, x[..., size:]], -1).transpose(1, 2).numpy()
    np.savez_compressed(Path(__file__).with_name("rope.npz"), **out)


if __name__ == "__main__":
    main()
