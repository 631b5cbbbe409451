"""What the families share in reading and writing a Hugging Face config.json: field tables, rotary parameters in both schemas, refusals.

The old schema (transformers 4) has `rope_theta` and `rope_scaling`; the new one (transformers 5) has `rope_parameters` and `layer_types`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshloom.models.base import ModelConfig
from meshloom.ops.act import ACTIVATIONS
from meshloom.ops.rope import Rope

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
"""rope_type -> the fields of `Rope` that it reads beside theta and partial."""
ROPE_NAMES = {"original": "original_max_position_embeddings"}
"""Fields of `Rope` that Hugging Face spells otherwise."""
ROPE_IGNORED = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")

SAME_ACT = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_new",
}
"""Hugging Face's other names for one function."""


def take(given: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields from a config.json. names: ours -> theirs. A key that is absent has its default; without one it is an error naming all such keys."""
    absent = [theirs for theirs in names.values() if theirs not in given and theirs not in defaults]
    if absent:
        raise ValueError(
            f"config.json of model_type '{given.get('model_type')}' lacks {', '.join(absent)}. Add what the model was made with."
        )
    return {ours: given.get(theirs, defaults.get(theirs)) for ours, theirs in names.items()}


def only(given: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """Refuses what would change the result and is not implemented. allowed: key -> the values that are; an absent key is fine."""
    for key, values in allowed.items():
        if key in given and given[key] not in values:
            choices = " or ".join(repr(v) for v in values)
            raise ValueError(f"config.json has {key} = {given[key]!r}, and only {choices} is implemented. This checkpoint cannot be read.")


def plain_heads(name: str, c: ModelConfig) -> None:
    """Refuses heads that a Hugging Face configuration without a number of key/value heads or a width of heads cannot say."""
    if c.kv_heads != c.heads or c.head * c.heads != c.embed:
        raise ValueError(
            f"Hugging Face's {name} has as many key/value heads as query heads, and embed / heads wide; this model has {c.heads} and {c.kv_heads}, "
            f"{c.head} wide. Use the llama family for such a model."
        )


def activation(name: str) -> str:
    """Our name of a Hugging Face activation. Raises ValueError listing those that exist."""
    ours = SAME_ACT.get(name, name)
    if ours not in ACTIVATIONS:
        raise ValueError(f"Activation '{name}' is not implemented. These are: {', '.join(sorted({*ACTIVATIONS, *SAME_ACT}))}.")
    return ours


def read_rope(given: Mapping[str, Any], theta: float, max_seq: int, partial: float = 1.0) -> Rope:
    """Rotary parameters of either schema. theta, partial: what stands where config.json says nothing.  Raises ValueError for a scaling or a
    parameter that is not implemented, and where layers differ."""
    stated = _one_for_all(given.get("rope_parameters") or given.get("rope_scaling") or {})
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise ValueError(f"Rotary scaling '{kind}' is not implemented. These are: {', '.join(ROPE_KEYS)}.")
    names = {field: ROPE_NAMES.get(field, field) for field in ROPE_KEYS[kind]}
    unknown = sorted(set(stated) - {*names.values(), *ROPE_NAMES.values(), *ROPE_IGNORED})
    if unknown:
        raise ValueError(
            f"Rotary scaling '{kind}' with {', '.join(unknown)} is not implemented. It reads {', '.join(names.values()) or 'nothing'}."
        )
    values = {field: stated[name] for field, name in names.items() if stated.get(name) is not None}
    if kind == "dynamic" or "original" in names:
        values.setdefault("original", given.get("original_max_position_embeddings", max_seq))
    if "factor" in names and "factor" not in values:
        values["factor"] = max_seq / values["original"]
    return Rope(
        kind=kind,
        theta=stated.get("rope_theta") or given.get("rope_theta") or theta,
        partial=_first(stated.get("partial_rotary_factor"), given.get("partial_rotary_factor"), partial),
        **values,
    )


def write_rope(rope: Rope, old: bool) -> dict[str, Any]:
    """The rotary keys of config.json, in either schema."""
    fields = {ROPE_NAMES.get(f, f): getattr(rope, f) for f in ROPE_KEYS[rope.kind] if not _unset(rope, f)}
    part = {"partial_rotary_factor": rope.partial} if rope.partial != 1 else {}
    if not old:
        return {"rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **part, **fields}}
    return {"rope_theta": rope.theta, **part, "rope_scaling": {"rope_type": rope.kind, **fields} if rope.kind != "default" else None}


def _unset(rope: Rope, field: str) -> bool:
    """Whether a parameter of yarn that may be left out is at the value that stands for its absence."""
    return rope.kind == "yarn" and field not in ("factor", "original") and getattr(rope, field) == Rope.model_fields[field].default


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def _one_for_all(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters stated for each kind of layer, where all agree."""
    nested = {key: value for key, value in stated.items() if isinstance(value, Mapping)}
    if not nested:
        return stated
    first, *others = nested.values()
    if any(other != first for other in others):
        raise ValueError(f"Rotary parameters that differ between layers ({', '.join(nested)}) are not implemented.")
    return first
