"""GGUF files of Llama-architecture models: weights dequantised, configuration, tokenizer, chat template. Read only; needs the `gguf` library.

GGUF stores query and key rows in the order of interleaved rotary pairs; they are put back into half-split order.
Source: ggml/docs/gguf.md; llama.cpp's convert_hf_to_gguf.py for the order of rows and the names of pre-tokenizers.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshloom.models import llama
from meshloom.models.base import Row
from meshloom.weights.load import Source

LAYER = "blk.{layer}."
ROWS = (
    Row("embed", "token_embd.weight", "v d -> v d"),
    Row("layers.attn_norm", LAYER + "attn_norm.weight", "d -> d"),
    Row("layers.attn.q", LAYER + "attn_q.weight", "(h i j) d -> d h (j i)"),
    Row("layers.attn.k", LAYER + "attn_k.weight", "(g i j) d -> d g (j i)"),
    Row("layers.attn.v", LAYER + "attn_v.weight", "(g k) d -> d g k"),
    Row("layers.attn.o", LAYER + "attn_output.weight", "d (h k) -> h k d"),
    Row("layers.mlp_norm", LAYER + "ffn_norm.weight", "d -> d"),
    Row("layers.mlp.gate", LAYER + "ffn_gate.weight", "f d -> d f"),
    Row("layers.mlp.up", LAYER + "ffn_up.weight", "f d -> d f"),
    Row("layers.mlp.down", LAYER + "ffn_down.weight", "d f -> f d"),
    Row("norm", "output_norm.weight", "d -> d"),
    Row("head", "output.weight", "v d -> v d"),
)
"""The map of GGUF's names; letters i and j are the pairs of a head and their two members."""
CONTROL, USER = 3, 4
"""GGUF's token types that are matched before any splitting: special ones, and a user's own."""


class Quantised(NamedTuple):
    """One tensor of the file, dequantised when it is read."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it; GGUF lists sizes innermost first."""
        return tuple(int(n) for n in reversed(self.tensor.shape))

    @property
    def dtype(self) -> np.dtype:
        """That of `view`."""
        return np.dtype(np.float32)

    def view(self) -> np.ndarray:
        """Its values in fp32."""
        from gguf.quants import dequantize

        return dequantize(self.tensor.data, self.tensor.tensor_type)


class Tokenizer(NamedTuple):
    """A tokenizer's files as text."""

    json: str
    """tokenizer.json, which the `tokenizers` library reads."""
    config: dict[str, Any]
    """tokenizer_config.json: special tokens and the chat template."""


class Gguf(NamedTuple):
    """What a GGUF file holds. source: for `load`. tokenizer: makes its tokenizer."""

    source: Source
    tokenizer: Callable[[], Tokenizer]


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins as GGUF files do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read(path: str | Path) -> Gguf:
    """Opens a GGUF file; weights are read by `load`.  Raises ValueError for another architecture or feature, ModuleNotFoundError without `gguf`."""
    path = Path(path)
    if not is_gguf(path):
        raise ValueError(f"{path} is not a GGUF file (it does not begin with 'GGUF').")
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Reading GGUF files needs the package `gguf`: pip install 'meshloom[gguf]'.") from None
    reader = GGUFReader(path)
    fields = {name: field.contents for name, field in reader.fields.items()}
    tensors = {tensor.name: Quantised(tensor) for tensor in reader.tensors}
    said = hf_config(path, fields, tensors)
    c = llama.MODEL.from_hf(said)
    ids = {key: said[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if said[key] is not None}
    source = Source(str(path), llama.MODEL, c, tensors, ROWS, {"i": c.head // 2, "j": 2}, said, ids)
    return Gguf(source, lambda: tokenizer(path, fields))


def hf_config(path: Path, fields: Mapping[str, Callable[[], Any]], tensors: Mapping[str, Quantised]) -> dict[str, Any]:
    """config.json of the file's metadata.  Raises ValueError for what is not plain Llama."""

    def get(name: str, default: Any = None) -> Any:
        value = fields[name]() if name in fields else default
        # stored as fp32: 9.99999975e-06 is 1e-5
        return float(str(np.float32(value))) if isinstance(value, float) else value

    kind = get("general.architecture")
    if kind != "llama":
        raise ValueError(
            f"{path} holds a model of architecture '{kind}'; only 'llama' is read from GGUF. Take the model's Hugging Face folder."
        )
    heads, embed = get("llama.attention.head_count"), get("llama.embedding_length")
    head = get("llama.attention.key_length", embed // heads)
    beyond = [name for name in ("rope_freqs.weight", "blk.0.ffn_gate_inp.weight") if name in tensors]
    if beyond or get("llama.rope.dimension_count", head) != head or get("llama.attention.value_length", head) != head:
        raise ValueError(
            f"{path} has features that are not read from GGUF ({', '.join(beyond) or 'partial rotary'}). Take its Hugging Face folder."
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get("llama.rope.freq_base", 10000.0)}
    scaling = get("llama.rope.scaling.type", "none")
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": get("llama.rope.scaling.factor")}
        rope |= {"original_max_position_embeddings": get("llama.rope.scaling.original_context_length")} if scaling == "yarn" else {}
    return {
        "model_type": "llama",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": embed,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
    }


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": WORDS % digits}, "behavior": "Isolated", "invert": False}


def _bytes(regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_bytes(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(True)],
    "llama-bpe": [_words(r"\p{N}{1,3}"), _bytes(False)],
    "qwen2": [_words(r"\p{N}"), _bytes(False)],
}
"""GGUF's name of a pre-tokenizer -> the steps of tokenizer.json."""
NORMALIZERS = {"qwen2": {"type": "NFC"}}


def tokenizer(path: Path, fields: Mapping[str, Callable[[], Any]]) -> Tokenizer:
    """The file's tokenizer.  Raises ValueError for one that is not byte-level BPE, or splits in a way that is not known."""
    get = {name.removeprefix("tokenizer."): field for name, field in fields.items() if name.startswith("tokenizer.")}
    kind, split = (get[name]() if name in get else None for name in ("ggml.model", "ggml.pre"))
    if kind != "gpt2" or split not in SPLITS:
        raise ValueError(
            f"{path} has a tokenizer of kind '{kind}', '{split}'; read are 'gpt2' with {', '.join(SPLITS)}. Give a tokenizer folder."
        )
    tokens, types = get["ggml.tokens"](), get["ggml.token_type"]()
    merges = get["ggml.merges"]() if "ggml.merges" in get else []
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] == CONTROL,
        }
        for i, token in enumerate(tokens)
        if types[i] in (CONTROL, USER)
    ]
    steps = SPLITS[split]
    special = {
        name: tokens[get[f"ggml.{key}_token_id"]()]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
        if f"ggml.{key}_token_id" in get
    }
    template = {"chat_template": get["chat_template"]()} if "chat_template" in get else {}
    bos = special["bos_token"] if "ggml.add_bos_token" in get and get["ggml.add_bos_token"]() else None
    out = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": NORMALIZERS.get(split),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _begin(bos, tokens.index(bos)) if bos else None,
        "decoder": _bytes(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return Tokenizer(json.dumps(out, ensure_ascii=False), {"tokenizer_class": "PreTrainedTokenizerFast", **special, **template})


def _begin(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts one token before every text."""
    mark, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [mark, text, {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [mark, text],
        "pair": pair,
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
