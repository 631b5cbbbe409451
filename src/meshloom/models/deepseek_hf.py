"""DeepSeek's map to Hugging Face: tensor names, and config.json in both schemas.

Source of defaults and meanings: the configuration and modelling classes of `transformers` 5.24 for deepseek_v2 and deepseek_v3.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from meshloom.models.base import Row
from meshloom.models.hf import only, read_rope, take, write_rope
from meshloom.models.moe_hf import by_stack, dense, joined, one_by_one, renamed

NAMES = {
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_dropout": "attention_dropout",
    "attention_bias": "attention_bias",
    "experts": "n_routed_experts",
    "top": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
    "first_dense": "first_k_dense_replace",
    "query_rank": "q_lora_rank",
    "key_rank": "kv_lora_rank",
    "nope_head": "qk_nope_head_dim",
    "rope_head": "qk_rope_head_dim",
    "value_head": "v_head_dim",
}
COMMON = {
    "num_key_value_heads": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **COMMON,
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        **COMMON,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
}
"""model_type -> what an absent key means."""
ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
IMPLIED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"score": "softmax", "normalize": False},
    "deepseek_v3": {"score": "sigmoid", "bias": True},
}
"""What a variant is, where the configuration does not say it."""


def rows(c: Any) -> tuple[Row, ...]:
    """The rows of the Hugging Face map of a configuration."""
    return by_stack(c, attention, partial(sparse, experts=one_by_one))


def fused(c: Any) -> tuple[Row, ...]:
    """The same, with all experts of a layer in one tensor, as `transformers` 5 has them in memory."""
    return by_stack(c, attention, partial(sparse, experts=joined))


def sparse(c: Any, layers: tuple[int, ...], experts: Callable[..., list[Row]]) -> list[Row]:
    """Router, its bias, experts, shared experts."""
    out, at, ours = experts(c, layers), "model.layers.{layer}.mlp.", "layers.sparse.mlp."
    if c.bias:
        out.append(Row(ours + "bias", at + "gate.e_score_correction_bias", "r -> r", layers))
    return out + (dense(layers, ours + "dense.", at + "shared_experts.") if c.shared else [])


def attention(c: Any, stack: str, layers: tuple[int, ...]) -> list[Row]:
    """Latent attention and norms of one stack of layers."""
    layer, at = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
    low, bias = c.query_rank is not None, c.attention_bias
    out = [
        (True, "attn_norm", layer + "input_layernorm.weight", "d -> d"),
        (not low, "attn.q", at + "q_proj.weight", "(h k) d -> d h k"),
        (low, "attn.q_in", at + "q_a_proj.weight", "a d -> d a"),
        (low and bias, "attn.q_bias", at + "q_a_proj.bias", "a -> a"),
        (low, "attn.q_norm", at + "q_a_layernorm.weight", "a -> a"),
        (low, "attn.q_out", at + "q_b_proj.weight", "(h k) a -> a h k"),
        (True, "attn.kv_in", at + "kv_a_proj_with_mqa.weight", "c d -> d c"),
        (bias, "attn.kv_bias", at + "kv_a_proj_with_mqa.bias", "c -> c"),
        (True, "attn.kv_norm", at + "kv_a_layernorm.weight", "z -> z"),
        (True, "attn.kv_out", at + "kv_b_proj.weight", "(h u) z -> z h u"),
        (True, "attn.o", at + "o_proj.weight", "d (h w) -> h w d"),
        (bias, "attn.o_bias", at + "o_proj.bias", "d -> d"),
        (True, "mlp_norm", layer + "post_attention_layernorm.weight", "d -> d"),
    ]
    return [Row(f"layers.{stack}.{ours}", theirs, form, layers) for there, ours, theirs, form in out if there]


def read(config: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """The function config.json -> configuration (made by `config`)."""
    return lambda given: config(**fields(given))


def fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's fields from config.json in either schema. Raises ValueError for what is not implemented."""
    variant, given = given["model_type"], renamed(given)
    defaults = DEFAULTS[variant]
    only(
        given,
        {"hidden_act": ("silu", "swish"), "mlp_bias": (False, None), "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", None)},
    )
    found = {ours: value for ours, value in take(given, NAMES, defaults).items() if value is not None or ours == "query_rank"}
    stated = {**defaults, **given}
    if stated.get("topk_method") == "greedy":
        found.update(groups=1, top_groups=1)
    rope = read_rope(given, 10000.0, found["max_seq"])
    v3 = variant == "deepseek_v3"
    return {
        **found,
        "variant": variant,
        "rope": rope,
        "normalize": bool(stated["norm_topk_prob"]) if v3 else False,
        "interleaved": bool(stated["rope_interleave"]) if v3 else True,
    }


def write(c: Any, old: bool) -> dict[str, Any]:
    """config.json of a configuration, in the old schema or the new one."""
    v2 = {"topk_method": "group_limited_greedy" if c.groups > 1 else "greedy"}
    v3 = {"norm_topk_prob": c.normalize, "rope_interleave": c.interleaved, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return {
        "architectures": [ARCHITECTURES[c.variant]],
        "model_type": c.variant,
        "hidden_act": "silu",
        **{theirs: getattr(c, ours) for ours, theirs in NAMES.items()},
        **(v2 if c.variant == "deepseek_v2" else v3),
        **write_rope(c.rope, old),
    }
