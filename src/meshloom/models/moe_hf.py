"""Mixtral's and Qwen3-MoE's map to Hugging Face: tensor names, and config.json in both schemas.

Files hold a tensor for each expert; `transformers` 5 joins a layer's experts in memory and takes them apart again when it saves. Both are read,
the first is written.  Source of defaults and meanings: the configuration classes of `transformers` 5.24.
"""

from collections.abc import Callable, Mapping
from typing import Any

from meshloom.models import llama_hf
from meshloom.models.base import Row
from meshloom.models.hf import only, read_rope, take, write_rope

COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        **COMMON,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    "qwen3_moe": {
        **COMMON,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "sliding_window": 4096,
    },
}
"""model_type -> what an absent key means."""
NAMES = {
    "mixtral": {"experts": "num_local_experts", "top": "num_experts_per_tok", "balance_loss": "router_aux_loss_coef"},
    "qwen3_moe": {
        "experts": "num_experts",
        "top": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "normalize": "norm_topk_prob",
        "balance_loss": "router_aux_loss_coef",
    },
}
"""model_type -> our fields beside those of every Llama."""
ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
IMPLIED: dict[str, dict[str, Any]] = {"qwen3_moe": {"qk_norm": True}}
"""What a variant is, where the configuration does not say it."""
OWN = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PLACES = {
    "mixtral": ("block_sparse_moe.", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.", OWN),
    "deepseek_v2": ("mlp.", OWN),
    "deepseek_v3": ("mlp.", OWN),
}
"""model_type -> where a layer's experts lie, and the names of their matrices."""


def rows(c: Any) -> tuple[Row, ...]:
    """The rows of the Hugging Face map of a configuration; none for variant plain."""
    return by_stack(c, attention, one_by_one) if c.variant in PLACES else ()


def fused(c: Any) -> tuple[Row, ...]:
    """The same, with all experts of a layer in one tensor, as `transformers` 5 has them in memory."""
    return by_stack(c, attention, joined) if c.variant in PLACES else ()


def by_stack(c: Any, attention: Callable[..., list[Row]], sparse: Callable[..., list[Row]]) -> tuple[Row, ...]:
    """The rows of a model with a stack of dense layers and one of layers with experts.  attention: (c, stack, numbers of its layers) -> rows of
    attention and norms.  sparse: (c, numbers of the layers) -> rows of their experts."""
    groups = {name: tuple(i for i, has in enumerate(c.sparse) if has == (name == "sparse")) for name in ("dense", "sparse")}
    out = [
        Row("embed", "model.embed_tokens.weight", "v d -> v d"),
        Row("norm", "model.norm.weight", "d -> d"),
        Row("head", "lm_head.weight", "v d -> v d"),
        Row("", "model.layers.{layer}.self_attn.rotary_emb.inv_freq", ""),
    ]
    for name, layers in groups.items():
        if layers:
            out += [*attention(c, name, layers), *(sparse(c, layers) if name == "sparse" else dense(layers))]
    return tuple(out)


def attention(c: Any, stack: str, layers: tuple[int, ...]) -> list[Row]:
    """Attention and norms of one stack of layers."""
    layer, at = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
    wanted = {
        "q_bias": c.qkv_bias,
        "k_bias": c.qkv_bias,
        "v_bias": c.qkv_bias,
        "o_bias": c.o_bias,
        "q_norm": c.qk_norm,
        "k_norm": c.qk_norm,
    }
    out = [
        ("attn_norm", layer + "input_layernorm.weight", "d -> d"),
        ("attn.q", at + "q_proj.weight", "(h k) d -> d h k"),
        ("attn.k", at + "k_proj.weight", "(g k) d -> d g k"),
        ("attn.v", at + "v_proj.weight", "(g k) d -> d g k"),
        ("attn.o", at + "o_proj.weight", "d (h k) -> h k d"),
        ("attn.q_bias", at + "q_proj.bias", "(h k) -> h k"),
        ("attn.k_bias", at + "k_proj.bias", "(g k) -> g k"),
        ("attn.v_bias", at + "v_proj.bias", "(g k) -> g k"),
        ("attn.o_bias", at + "o_proj.bias", "d -> d"),
        ("attn.q_norm", at + "q_norm.weight", "k -> k"),
        ("attn.k_norm", at + "k_norm.weight", "k -> k"),
        ("mlp_norm", layer + "post_attention_layernorm.weight", "d -> d"),
    ]
    there = (row for row in out if wanted.get(row[0].partition(".")[2], True))
    return [Row(f"layers.{stack}.{ours}", theirs, form, layers) for ours, theirs, form in there]


def dense(layers: tuple[int, ...], ours: str = "layers.dense.mlp.", theirs: str = "model.layers.{layer}.mlp.") -> list[Row]:
    """A gated MLP."""
    forms = {"gate": "f d -> d f", "up": "f d -> d f", "down": "d f -> f d"}
    return [Row(ours + name, f"{theirs}{name}_proj.weight", form, layers) for name, form in forms.items()]


def one_by_one(c: Any, layers: tuple[int, ...]) -> list[Row]:
    """Router and experts, a tensor for each."""
    inside, names = PLACES[c.variant]
    at, ours = "model.layers.{layer}." + inside, "layers.sparse.mlp."
    forms = {"gate": "m d -> d m", "up": "m d -> d m", "down": "d m -> m d"}
    experts = [Row(ours + name, f"{at}experts.{{expert}}.{names[name]}.weight", form, layers) for name, form in forms.items()]
    return [Row(ours + "router", at + "gate.weight", "r d -> d r", layers), *experts]


def joined(c: Any, layers: tuple[int, ...]) -> list[Row]:
    """Router and experts, all experts of a layer in one tensor: gate above up."""
    at, ours = "model.layers.{layer}.mlp.", "layers.sparse.mlp."
    return [
        Row(ours + "router", at + "gate.weight", "r d -> d r", layers),
        Row((ours + "gate", ours + "up"), at + "experts.gate_up_proj", "e (n m) d -> n e d m", layers),
        Row(ours + "down", at + "experts.down_proj", "e d m -> e m d", layers),
    ]


def read(config: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """The function config.json -> configuration (made by `config`)."""
    return lambda given: config(**fields(given))


def fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's fields from config.json in either schema. Raises ValueError for what is not implemented."""
    variant, given = given["model_type"], renamed(given)
    defaults = DEFAULTS[variant]
    only(given, {"hidden_act": ("silu", "swish"), "router_jitter_noise": (0, None)})
    names = {**llama_hf.NAMES, **NAMES[variant]}
    found = {ours: value for ours, value in take(given, names, defaults).items() if value is not None}
    stated = {**defaults, **given}
    rope = read_rope(given, defaults.get("rope_theta", 10000.0), found["max_seq"])
    return {**found, "variant": variant, "rope": rope, **READ[variant](stated, found)}


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with each model_type's own key for the number of experts, where `transformers` 5 has written its common one."""
    own = {"qwen3_moe": "num_experts", "deepseek_v2": "n_routed_experts", "deepseek_v3": "n_routed_experts"}.get(given["model_type"])
    common = given.get("num_local_experts")
    return {**given, own: common} if own and own not in given and common is not None else dict(given)


def _mixtral(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "window": given["sliding_window"],
        "expert_ffn": found["ffn"],
        "normalize": True,
        "qk_norm": False,
        "qkv_bias": False,
        "o_bias": False,
    }


def _qwen3(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    both, every, without = bool(given.get("attention_bias")), given["decoder_sparse_step"], given.get("mlp_only_layers") or ()
    sparse = tuple(i not in without and (i + 1) % every == 0 for i in range(found["layers"]))
    window = given["sliding_window"] if given.get("use_sliding_window") else None
    return {"window": window, "qk_norm": True, "qkv_bias": both, "o_bias": both, "moe_layers": () if all(sparse) else sparse}


READ = {"mixtral": _mixtral, "qwen3_moe": _qwen3}
"""model_type -> (config.json with defaults, fields found) -> the other fields."""
FREE = ("capacity", "balance", "router_z_loss")
"""Fields that say how a model is trained, which no config.json holds."""


def unsaid(c: Any) -> list[str]:
    """Fields of a configuration that its variant's config.json cannot say: what is not there when it is written and read back."""
    if c.variant not in READ:
        return []
    again = type(c).model_construct(**{**{name: f.default for name, f in type(c).model_fields.items()}, **fields(write(c, False))})
    return [
        f"{n} = {getattr(c, n)!r}" for n in type(c).model_fields if n not in FREE and _kept(c, n) and getattr(c, n) != getattr(again, n)
    ]


def _kept(c: Any, name: str) -> bool:
    """Whether a difference in a field is one: how much padding the vocabulary has is not said in files."""
    return name not in ("vocab_multiple", "dropout", "head", "kv_heads")


def write(c: Any, old: bool) -> dict[str, Any]:
    """config.json of a configuration, in the old schema or the new one."""
    extra: dict[str, dict[str, Any]] = {
        "mixtral": {"sliding_window": c.window},
        "qwen3_moe": {
            "attention_bias": c.o_bias,
            "use_sliding_window": c.window is not None,
            "sliding_window": c.window,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(c.sparse) if not sparse],
        },
    }
    return {
        "architectures": [ARCHITECTURES[c.variant]],
        "model_type": c.variant,
        "hidden_act": "silu",
        **{theirs: getattr(c, ours) for ours, theirs in {**llama_hf.NAMES, **NAMES[c.variant]}.items()},
        **extra[c.variant],
        **write_rope(c.rope, old),
    }
