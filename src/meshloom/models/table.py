"""The MODELS table, and which family a Hugging Face model_type is."""

import difflib
from collections.abc import Mapping
from typing import Any

from meshloom.models import gpt2, llama, llama_hf, moe, moe_hf, neox
from meshloom.models.base import Model

MODELS = {m.name: m for m in (gpt2.MODEL, neox.MODEL, llama.MODEL, moe.MODEL)}
"""Our name of each family -> the family."""
HF_TYPES = {
    "gpt2": gpt2.MODEL,
    "gpt_neox": neox.MODEL,
    **dict.fromkeys(llama_hf.DEFAULTS, llama.MODEL),
    **dict.fromkeys(moe_hf.DEFAULTS, moe.MODEL),
}
"""Hugging Face's model_type -> the family."""


def find(given: Mapping[str, Any]) -> Model:
    """The family of a config.json. Raises ValueError listing the model types that exist, nearest first."""
    asked = given.get("model_type")
    if asked in HF_TYPES:
        return HF_TYPES[asked]
    near = difflib.get_close_matches(str(asked), HF_TYPES, len(HF_TYPES), 0.0)
    what = f"model_type '{asked}' is not implemented" if asked else "config.json has no model_type"
    raise ValueError(f"{what}. These are: {', '.join(near)}.")
