"""Tokenizers: a tokenizer.json or a Hugging Face tokenizer folder, read with the `tokenizers` library, and byte-level BPE trained on own text."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from meshloom.core.files import write_bytes
from meshloom.data.config import Tokenizer as TokenizerSection

SHIPPED = Path(__file__).parent / "corpus" / "tokenizer"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
USUAL = {  # the names that a bare tokenizer.json is searched for, in this order
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>"),
    "eos_token": ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"),
    "pad_token": ("<|pad|>", "<pad>", "<|finetune_right_pad_id|>"),
}
CONTROL = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")  # of tokenizers trained here, ids 0..3


class Tokenizer:
    """A tokenizer with its control tokens. It never adds a start token by itself, so a text or template that has one keeps exactly one.

    files: name -> bytes, as they were read; `save` writes them back byte for byte."""

    def __init__(self, files: dict[str, bytes], config: TokenizerSection, name: str):
        self.files, self.config, self.name = files, config, name
        self.backend = backend(files["tokenizer.json"], config.control_text)
        settings = {n: json.loads(files[n]) for n in files if n.endswith("config.json") or n.endswith("map.json")}
        self.settings = settings.get("tokenizer_config.json", {})
        self.special = {kind: self._special(kind, settings) for kind in USUAL}
        self.bos, self.pad = self.special["bos_token"], self.special["pad_token"]
        self.eos = self._stops(settings)
        self.end = self._end()

    def _special(self, kind: str, settings: dict[str, Any]) -> int | None:
        """Id of a control token: from tokenizer_config.json, else special_tokens_map.json, else a usual name."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if kind in settings.get(name, {}):
                value = settings[name][kind]
                return self._known(value["content"] if isinstance(value, dict) else value) if value else None
        known = (self.backend.token_to_id(t) for t in USUAL[kind])
        return next((i for i in known if i is not None), None)

    def _known(self, token: str) -> int:
        found = self.backend.token_to_id(token)
        if found is None:
            raise ValueError(
                f"Tokenizer {self.name} names the token {token!r}, which its vocabulary of {self.size} does not have. "
                "Use the tokenizer_config.json that belongs to it."
            )
        return found

    def _stops(self, settings: dict[str, Any]) -> tuple[int, ...]:
        """Every id that ends a generation: tokenizer_config's end token, then those of generation_config.json."""
        more = settings.get("generation_config.json", {}).get("eos_token_id")
        stops = [self.special["eos_token"], *(more if isinstance(more, list) else [more])]
        return tuple(dict.fromkeys(i for i in stops if i is not None))

    def _end(self) -> int:
        if self.config.end:
            return self._known(self.config.end)
        if not self.eos:
            raise ValueError(
                f"Tokenizer {self.name} names no end-of-text token. Set tokenizer.end to the text of the token that should end a document."
            )
        return self.eos[0]

    @property
    def size(self) -> int:
        """Ids that the tokenizer can give, added tokens included: the least vocabulary of a model that reads them."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def chat_template(self) -> str:
        """The Jinja text of the chat template, empty where there is none."""
        if "chat_template.jinja" in self.files:
            return self.files["chat_template.jinja"].decode()
        template = self.settings.get("chat_template", "")
        return template if isinstance(template, str) else next((t["template"] for t in template if t["name"] == "default"), "")

    @cached_property
    def hash(self) -> str:
        """Changes with everything that changes the ids of a document: the model and rules, the start and end tokens, how control text is read."""
        options = json.dumps([self.config.control_text, self.bos if self.config.bos else None, self.end])
        return hashlib.sha256(self.files["tokenizer.json"] + b"\0" + options.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without start or end token. Control tokens in it are ordinary text unless tokenizer.control_text is `control`."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str], cores: str = "all") -> list[list[int]]:
        """Ids of whole documents: the start token where the section asks for one and the text does not begin with it, the text, the end token."""
        start = [self.bos] if self.config.bos and self.bos is not None else []
        batch = {"all": self.backend.encode_batch_fast, "one": self._one_by_one}[cores](list(texts), add_special_tokens=False)
        found = [e.ids for e in batch]
        return [(start if ids[:1] != start else []) + ids + [self.end] for ids in found]

    def _one_by_one(self, texts: Sequence[str], **how: Any) -> list[Any]:
        return [self.backend.encode(t, **how) for t in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of some ids; control tokens are shown unless skip_special."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def save(self, folder: str | Path) -> None:
        """Writes the files as they were read, byte for byte; a tokenizer that had none gets a tokenizer_config.json, which Hugging Face needs."""
        for name, raw in {"tokenizer_config.json": self._hf_config(), **self.files}.items():
            write_bytes(Path(folder) / name, raw)

    def _hf_config(self) -> bytes:
        named = {kind: self.backend.id_to_token(i) for kind, i in self.special.items() if i is not None}
        return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}, indent=2, ensure_ascii=False).encode()


def backend(raw: bytes, control_text: str):
    """The `tokenizers` object for the bytes of a tokenizer.json, without truncation or padding."""
    import tokenizers

    out = tokenizers.Tokenizer.from_str(raw.decode())
    out.encode_special_tokens = control_text == "plain"
    out.no_truncation()
    out.no_padding()
    return out


def load(path: str = "shipped", config: TokenizerSection | None = None) -> Tokenizer:
    """The tokenizer at a path: a tokenizer.json, a folder that holds one (or vocab.json and merges.txt), or `shipped`."""
    config = config or TokenizerSection(path=path)
    place = SHIPPED if path == "shipped" else Path(path).expanduser()
    if not place.exists():
        raise ValueError(f"There is no tokenizer at {place}. Give a tokenizer.json, a folder that holds one, or 'shipped'.")
    found = {"tokenizer.json": place} if place.is_file() else {n: place / n for n in FILES if (place / n).exists()}
    files = {name: path.read_bytes() for name, path in found.items()}
    if "tokenizer.json" not in files and {"vocab.json", "merges.txt"} <= files.keys():
        files["tokenizer.json"] = from_vocab_and_merges(place)
    if "tokenizer.json" not in files:
        raise ValueError(
            f"{place} holds no tokenizer.json. Found: {', '.join(sorted(p.name for p in place.iterdir())[:8]) or 'nothing'}. "
            "Save the tokenizer as a fast tokenizer first."
        )
    try:
        return Tokenizer(files, config, str(place))
    except ValueError:
        raise
    except Exception as e:  # the library raises bare Exception for a broken file
        raise ValueError(f"{place} is not a tokenizer.json that the `tokenizers` library can read: {e}") from e


def beside(files: Path | Mapping[str, str] | None, section: TokenizerSection, model: str) -> Tokenizer:
    """The tokenizer that lies beside a model: in a folder, or as names and texts of its files.  model: what to call it.
    Raises ValueError where there is none (None)."""
    if files is None:
        raise ValueError(f"{model} has no tokenizer beside it. Copy its tokenizer.json there.")
    if isinstance(files, Path):
        return load(str(files), section)
    return Tokenizer({name: text.encode() for name, text in files.items()}, section, model)


def from_vocab_and_merges(folder: Path) -> bytes:
    """GPT-2's older two files as the bytes of a tokenizer.json."""
    import tokenizers

    model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    out = tokenizers.Tokenizer(model)
    out.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = tokenizers.decoders.ByteLevel()
    out.add_special_tokens([t for t in USUAL["eos_token"] if out.token_to_id(t) is not None])
    return out.to_str().encode()


def train(texts: Iterable[str], vocab: int, out: str | Path, progress: bool = False) -> Tokenizer:
    """Trains byte-level BPE on these texts and saves it in the folder `out`.  vocab: its size, control tokens and 256 bytes included.

    Digits are tokens of their own, and every text decodes back to itself.  Raises ValueError for fewer than 260 tokens, or no text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    least = 256 + len(CONTROL)
    if vocab < least:
        raise ValueError(f"A byte-level vocabulary of {vocab} is too small: 256 bytes and {len(CONTROL)} control tokens need {least}.")
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    seen = [0]

    def counted() -> Iterable[str]:
        for text in texts:
            seen[0] += len(text)
            yield text

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(CONTROL), initial_alphabet=sorted(alphabet), show_progress=progress)
    tok.train_from_iterator(counted(), trainer)
    if not seen[0]:
        raise ValueError("There is no text to train a tokenizer on. Check the path and the field.")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": CONTROL[0],
        "pad_token": CONTROL[1],
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": tok.to_str(pretty=True).encode(), "tokenizer_config.json": json.dumps(settings, indent=2).encode()}
    trained = Tokenizer(files, TokenizerSection(path=str(out)), str(out))
    trained.save(out)
    return trained


def check_vocabulary(tokenizer_size: int, model_vocab: int, name: str = "the tokenizer") -> None:
    """Raises ValueError where a model's vocabulary has fewer entries than the tokenizer has ids."""
    if model_vocab < tokenizer_size:
        raise ValueError(
            f"The model's vocabulary has {model_vocab} entries, but {name} gives ids up to {tokenizer_size - 1}. "
            f"Set model.vocab to at least {tokenizer_size}, or choose another tokenizer."
        )
