"""The models that are measured, as both sides build them, and tiny forms of them for the tests."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A model and its batch. model: fields of our configuration, `family` among them. batch, seq: of one train step."""

    model: dict[str, Any]
    batch: int
    seq: int


GPT = {"family": "gpt2", "layers": 6, "embed": 384, "heads": 6, "ffn": 1536, "vocab": 8192, "max_seq": 256, "act": "gelu_pytorch_tanh"}
LLAMA = {"family": "llama", "layers": 6, "embed": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192, "max_seq": 512}
EXPERTS = {**LLAMA, "family": "moe", "variant": "mixtral", "experts": 8, "top": 2, "ffn": 704}
"""As many numbers multiplied a token as in LLAMA: 2 experts of half its width, of 8."""
SMALL = {"layers": 2, "embed": 32, "heads": 4, "ffn": 64, "vocab": 256, "max_seq": 64}

SHAPES = {
    "gpt": Shape(GPT, 8, 256),
    "llama": Shape(LLAMA, 2, 512),
    "experts": Shape(EXPERTS, 2, 512),
    "gpt-tiny": Shape({**GPT, **SMALL}, 2, 32),
    "llama-tiny": Shape({**LLAMA, **SMALL, "kv_heads": 2}, 2, 32),
    "experts-tiny": Shape({**EXPERTS, **SMALL, "kv_heads": 2, "ffn": 32}, 2, 32),
}
LEARNING_RATE, DECAY, BETAS, CLIP = 1e-3, 0.1, (0.9, 0.95), 1.0
"""AdamW with decay on matrices only, and clipping by the global norm, on both sides."""


def tokens(shape: Shape, step: int) -> Any:
    """The ids of one step, int64 [batch, seq + 1], the same in every program."""
    import numpy as np

    return np.random.default_rng([7, step % 4]).integers(0, shape.model["vocab"], (shape.batch, shape.seq + 1))
