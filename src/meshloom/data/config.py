"""The `data` and `tokenizer` sections of a recipe."""

import os
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from meshloom.core.config import Section

Format = Literal["auto", "text", "jsonl", "parquet", "datasets", "store"]
Packing = Literal["documents", "stream", "rows"]
LongRule = Literal["error", "drop", "truncate", "split"]


class Source(Section):
    """One place that documents come from."""

    path: str
    """File, folder, or prefix of a token store (`x` for `x.bin` and `x.idx`). `corpus` is the public-domain corpus that the package ships."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the SAMPLES (rows of `seq` tokens) drawn from this source, relative to the other weights: 1 and 3 give a quarter and three quarters."""
    field: str = "text"
    """Key of a JSON object, or column of a Parquet or `datasets` table, that holds the text."""
    format: Format = "auto"
    """`auto` decides by the file's ending: .txt .md, .jsonl .ndjson (each also with .gz or .zst), .parquet, .idx; by its files for a `datasets` folder."""
    split: Literal["file", "line", "paragraph"] = "file"
    """What one document is in plain text: the whole file, each line, or each run of lines between blank ones."""


class Data(Section):
    """What to train on, and how documents become rows of tokens."""

    train: tuple[Source, ...] = (Source(path="corpus"),)
    """Sources of the training set. A single path may be given in place of the list."""
    valid: float | tuple[Source, ...] = 0.02
    """Held-out set: the fraction of each training source's documents that is kept out of training, or sources of its own. 0: none."""
    split_seed: int = 0
    """A document is held out by a pure function of (split_seed, its number), so another training seed keeps the same held-out set."""
    seq: PositiveInt = 256
    """Tokens in a row (the inputs; targets are the same tokens shifted by one)."""
    packing: Packing = "documents"
    """`documents`: rows are windows over all documents one after another; each piece is a segment, attention and positions stop at its borders.
    `stream`: the same windows, with no borders. `rows`: one document a row, padded; `long` says what happens to longer ones."""
    long: LongRule = "error"
    """For packing `rows`, a document of more than `seq` tokens: `error` names it, `drop` leaves it out, `truncate` keeps the first `seq` tokens
    (its end token is lost), `split` makes several rows (the end token is in the last)."""
    shuffle: bool = True
    """Draw the rows of each epoch in a new order, a pure function of (seed, epoch). False: the order of the store."""
    on_bad: Literal["stop", "skip"] = "stop"
    """A document that is broken JSON, lacks the field, is empty, not UTF-8, too long ...: stop at the first, or skip it.
    Both say file and line, and count by kind."""
    max_bytes: PositiveInt = 64 << 20
    """A document of more bytes than this is bad (`too long`). Also bounds the memory for reading one line."""
    cache: str = "~/.cache/meshloom/data"
    """Folder of prepared token stores; each is named by a hash of the documents, the tokenizer and the options that change tokens."""
    workers: PositiveInt = Field(default_factory=lambda: os.cpu_count() or 1)
    """Processes that tokenize. The result does not depend on it."""
    prefetch: PositiveInt = 2
    """Batches that are made ready in the background while a step runs."""

    @field_validator("train", "valid", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (Source(path=value),) if isinstance(value, str) else value

    @field_validator("valid")
    @classmethod
    def _fraction(cls, value: Any) -> Any:
        if not isinstance(value, tuple) and not 0 <= value < 1:
            raise ValueError(f"the fraction of documents to hold out must be at least 0 and less than 1; you gave {value}.")
        return value

    @field_validator("train", "valid")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if value == ():
            raise ValueError("the list of sources is empty. Give at least one path, or 'corpus' for the text that the package ships.")
        return value


class Tokenizer(Section):
    """Which tokenizer, and how it treats documents."""

    path: str = "shipped"
    """A tokenizer.json, a Hugging Face tokenizer folder, or `shipped` (byte-level BPE, 4,096 tokens, trained on the shipped corpus)."""
    bos: bool = False
    """Put the tokenizer's start token before every document (never a second one)."""
    end: str = ""
    """Token that ends every document, by its text. Empty: the tokenizer's own end-of-text token."""
    control_text: Literal["plain", "control"] = "plain"
    """Text in a document that spells a control token (`<|endoftext|>`): `plain` makes ordinary tokens of it, `control` the control token itself."""
