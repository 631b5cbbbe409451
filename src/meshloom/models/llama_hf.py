"""The Llama line's map to Hugging Face: tensor names, and config.json in both schemas.

Source of the defaults and meanings: the configuration classes of `transformers` 5.24 for each model_type.
"""

from collections.abc import Callable, Mapping
from typing import Any

from meshloom.models.base import Row
from meshloom.models.hf import only, read_rope, take, write_rope

NAMES = {
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_dropout": "attention_dropout",
}
"""Our fields that mean the same in every variant."""
COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": {**COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {**COMMON, "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        **COMMON,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "smollm3": {
        **COMMON,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
}
"""model_type -> what an absent key means."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
IMPLIED: dict[str, dict[str, Any]] = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
"""What a variant is, where the configuration does not say it."""
SLIDING, FULL = "sliding_attention", "full_attention"


def rows(c: Any) -> tuple[Row, ...]:
    """The rows of the Hugging Face map of a configuration."""
    layer = "model.layers.{layer}."
    at, mlp = layer + "self_attn.", layer + "mlp."
    out = [
        Row("embed", "model.embed_tokens.weight", "v d -> v d"),
        Row("layers.attn_norm", layer + "input_layernorm.weight", "d -> d"),
        Row("layers.attn.q", at + "q_proj.weight", "(h k) d -> d h k"),
        Row("layers.attn.k", at + "k_proj.weight", "(g k) d -> d g k"),
        Row("layers.attn.v", at + "v_proj.weight", "(g k) d -> d g k"),
        Row("layers.attn.o", at + "o_proj.weight", "d (h k) -> h k d"),
        Row("layers.mlp_norm", layer + "post_attention_layernorm.weight", "d -> d"),
        Row("layers.mlp.gate", mlp + "gate_proj.weight", "f d -> d f"),
        Row("layers.mlp.up", mlp + "up_proj.weight", "f d -> d f"),
        Row("layers.mlp.down", mlp + "down_proj.weight", "d f -> f d"),
        Row("norm", "model.norm.weight", "d -> d"),
        Row("head", "lm_head.weight", "v d -> v d"),
        Row("", at + "rotary_emb.inv_freq", ""),
    ]
    if c.qkv_bias:
        out += [
            Row("layers.attn.q_bias", at + "q_proj.bias", "(h k) -> h k"),
            Row("layers.attn.k_bias", at + "k_proj.bias", "(g k) -> g k"),
            Row("layers.attn.v_bias", at + "v_proj.bias", "(g k) -> g k"),
        ]
    if c.o_bias:
        out.append(Row("layers.attn.o_bias", at + "o_proj.bias", "d -> d"))
    if c.qk_norm:
        out += [Row("layers.attn.q_norm", at + "q_norm.weight", "k -> k"), Row("layers.attn.k_norm", at + "k_norm.weight", "k -> k")]
    if c.mlp_bias:
        out += [
            Row("layers.mlp.gate_bias", mlp + "gate_proj.bias", "f -> f"),
            Row("layers.mlp.up_bias", mlp + "up_proj.bias", "f -> f"),
            Row("layers.mlp.down_bias", mlp + "down_proj.bias", "d -> d"),
        ]
    return tuple(out)


def read(config: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """The function config.json -> configuration (made by `config`)."""
    return lambda given: config(**fields(given))


def fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's fields from config.json in either schema. Raises ValueError for what is not implemented."""
    variant = given["model_type"]
    defaults = DEFAULTS[variant]
    only(given, {"hidden_act": ("silu", "swish")})
    found = {ours: value for ours, value in take(given, NAMES, defaults).items() if value is not None}
    stated = {**defaults, **given}
    window, windowed = WINDOWS[variant](stated, found["layers"])
    rope = read_rope(given, defaults.get("rope_theta", 10000.0), found["max_seq"])
    if rope.partial != 1:
        raise ValueError(
            f"Partial rotary positions ({rope.partial}) do not exist in the Llama line: `transformers` turns whole heads. Remove the key."
        )
    return {
        **found,
        "variant": variant,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        **BIASES[variant](stated),
        "qk_norm": variant == "qwen3",
        "window": window,
        "windowed_layers": windowed,
        "rotary_layers": _no_rope(stated, found["layers"]) if variant == "smollm3" else (),
        "rope": rope,
    }


def unsaid(c: Any) -> list[str]:
    """Fields of a configuration that its variant's config.json cannot say: what is not there when it is written and read back."""
    return [f"{name} = {getattr(c, name)!r}" for name, value in fields(write(c, False)).items() if getattr(c, name) != value]


def _stated_biases(given: Mapping[str, Any]) -> dict[str, bool]:
    both = bool(given.get("attention_bias"))
    return {"qkv_bias": both, "o_bias": both, "mlp_bias": bool(given.get("mlp_bias"))}


def _qwen3_biases(given: Mapping[str, Any]) -> dict[str, bool]:
    return {**_stated_biases(given), "mlp_bias": False}


BIASES = {
    "llama": _stated_biases,
    "mistral": lambda given: {},
    "qwen2": lambda given: {"qkv_bias": True},
    "qwen3": _qwen3_biases,
    "smollm3": _stated_biases,
}
"""model_type -> its biases."""


def _no_window(given: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    return None, ()


def _window_everywhere(given: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    if len(set(given.get("layer_types") or ())) > 1:
        raise ValueError("A Mistral model whose layer_types differ is not implemented: `transformers` itself gives every layer the window.")
    return given["sliding_window"], ()


def _window_by_layer(given: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Window, and which layers have it: `layer_types`, else every layer from `max_window_layers` on (Qwen), else those without rotary (SmolLM3)."""
    window = given["sliding_window"] if given.get("use_sliding_window") else None
    if window is None:
        return None, ()
    if given.get("layer_types"):
        windowed = tuple(kind == SLIDING for kind in given["layer_types"])
    elif "max_window_layers" in given:
        windowed = tuple(i >= given["max_window_layers"] for i in range(layers))
    else:
        windowed = tuple(not has for has in _no_rope(given, layers) or (True,) * layers)
    return (window, () if all(windowed) else windowed) if any(windowed) else (None, ())


WINDOWS = {
    "llama": _no_window,
    "mistral": _window_everywhere,
    "qwen2": _window_by_layer,
    "qwen3": _window_by_layer,
    "smollm3": _window_by_layer,
}
"""model_type -> (config.json, layers) -> window, which layers have it (empty: all)."""


def _no_rope(given: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have rotary positions (empty: all)."""
    every = given["no_rope_layer_interval"]
    has = tuple(bool(x) for x in given.get("no_rope_layers") or [(i + 1) % every for i in range(layers)])[:layers]
    return () if all(has) else has


def write(c: Any, old: bool) -> dict[str, Any]:
    """config.json of a configuration, in the old schema or the new one."""
    windowed = [c.window is not None and has for has in c.windowed_layers or (True,) * c.layers]
    by_layer = {
        "use_sliding_window": c.window is not None,
        "sliding_window": c.window,
        "layer_types": [SLIDING if w else FULL for w in windowed],
    }
    first = next((i for i, w in enumerate(windowed) if w), c.layers)
    qwen = {**by_layer, "max_window_layers": first}
    if old and all(windowed[first:]):
        del qwen["layer_types"]
    attention_bias, mlp_bias = {"attention_bias": c.o_bias}, {"mlp_bias": c.mlp_bias}
    extra: dict[str, dict[str, Any]] = {
        "llama": {**attention_bias, **mlp_bias},
        "mistral": {"sliding_window": c.window},
        "qwen2": qwen,
        "qwen3": {**attention_bias, **qwen},
        "smollm3": {
            **attention_bias,
            **mlp_bias,
            **by_layer,
            "no_rope_layers": [int(has) for has in c.rotary_layers or (True,) * c.layers],
            "no_rope_layer_interval": 4,
        },
    }
    return {
        "architectures": [ARCHITECTURES[c.variant]],
        "model_type": c.variant,
        "hidden_act": "silu",
        **{theirs: getattr(c, ours) for ours, theirs in NAMES.items()},
        **extra[c.variant],
        **write_rope(c.rope, old),
    }
