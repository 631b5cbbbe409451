"""`meshloom eval`: the loss of a model on a text, whatever the batch and the layout."""

import json as jsonlib
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from meshloom.core.config import load as load_section
from meshloom.core.mesh import make_mesh, shardings
from meshloom.data import tokenizer as tokenizers
from meshloom.data.config import Data
from meshloom.data.config import Tokenizer as TokenizerSection
from meshloom.data.loader import Loader
from meshloom.data.sets import open_held_out
from meshloom.parallel.table import build
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.feed import Feed
from meshloom.train.score import Score, make_score, score
from meshloom.weights.opened import Opened, open_model


class Scores(NamedTuple):
    """What was measured. loss: nats a token. bits_per_byte: of the text's UTF-8 bytes. tokens: scored; bytes: that they stand for.

    The first token of a document is never scored and its bytes are not counted; a document that is longer than a row is cut in rows, each
    of which sees only itself (packing `documents`). seq, packing: how rows were made, which the numbers depend on.
    """

    model: str
    loss: float
    perplexity: float
    bits_per_byte: float
    accuracy: float
    tokens: int
    bytes: int
    documents: int
    seq: int
    packing: str


def evaluate(
    path: str,
    data: tuple[str, ...] = (),
    *,
    step: int | None = None,
    sequences: int = 8,
    limit: int = 0,
    layout: str = "auto",
    seq: int = 0,
) -> Scores:
    """Scores a model on its run's held-out split, or on the given files.  limit: rows scored in all, 0 for every one.  seq: tokens in a row; 0: as in
    training, or 1,024 within the model's length.  Raises ValueError where there is nothing to score."""
    for name, given, least in (("sequences", sequences, 1), ("limit", limit, 0), ("seq", seq, 0)):
        if given < least:
            raise ValueError(f"--{name} is {given}; it must be at least {least}.")
    opened = open_model(path, step)
    section, tokenizer = _data(opened, data, seq)
    valid = open_held_out(section, tokenizer, progress=True)
    if valid is None:
        raise ValueError("The run has no held-out split (data.valid is 0). Give --data with a text to score.")
    lay = build("" if layout == "auto" else layout, opened.config, section.seq, jax.devices()[0].platform)
    mesh = make_mesh(lay)
    plan = Plan(mesh, lay, How("scan"), 1, "float32", section.packing == "documents")
    params = opened.weights(shardings(mesh, lay, "rest", opened.model.specs(opened.config)) if lay.devices > 1 else None)
    feed = Feed(plan, lay.even(sequences), section.seq)
    whole = limit == 0 or limit >= valid.rows
    got = score(make_score(opened.model, opened.config, plan), params, feed.once(valid, limit))
    if not got.tokens:
        raise ValueError("Not one token of this text can be scored: every document has a single token. Give longer text.")
    return _scores(opened, got, valid, tokenizer, section, whole)


def _data(opened: Opened, data: tuple[str, ...], seq: int) -> tuple[Data, tokenizers.Tokenizer]:
    """The data section and the tokenizer to score with."""
    recipe = opened.info.get("recipe", {})
    given: dict[str, Any] = dict(recipe.get("data", {}))
    if data:
        given |= {"train": [{"path": p} for p in data], "valid": [{"path": p} for p in data]}
    elif not given:
        raise ValueError(f"{opened.name} does not say what it was trained on. Give --data with a text to score.")
    given["seq"] = seq or given.get("seq") or min(1024, opened.config.max_seq)
    if given["seq"] > opened.config.max_seq:
        raise ValueError(
            f"Rows of {given['seq']} tokens are longer than the model's max_seq {opened.config.max_seq}. Give --seq of at most that."
        )
    return load_section(Data, given, "data"), tokenizer_of(opened, recipe)


def tokenizer_of(opened: Opened, recipe: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that lies beside a model, with the rules of its recipe."""
    section = load_section(TokenizerSection, recipe.get("tokenizer", {}), "tokenizer")
    return tokenizers.beside(opened.tokenizer, section.model_copy(update={"path": opened.name}), opened.name)


def _scores(opened: Opened, got: Score, valid: Loader, tokenizer: tokenizers.Tokenizer, section: Data, whole: bool) -> Scores:
    """The report. Bytes are those of all documents' text but each one's first token; of a part of the rows, in proportion to its tokens."""
    size = documents = 0
    for part in valid.parts:
        lengths = np.diff(part.stream.ends, prepend=0)
        for start, length in zip(part.stream.starts, lengths):
            ids = part.stream.store.tokens[start : start + length]
            size += len(tokenizer.decode(ids[1:], skip_special=True).encode())
            documents += 1
    bits = got.nll / math.log(2) / size if size and whole else math.nan
    return Scores(
        opened.name,
        got.loss,
        got.perplexity,
        bits,
        got.accuracy,
        int(got.tokens),
        size if whole else 0,
        documents,
        section.seq,
        section.packing,
    )


def show(scores: Scores, json: bool = False) -> None:
    """Prints a report: a line each, or one JSON object."""
    if json:
        print(jsonlib.dumps({k: None if isinstance(v, float) and math.isnan(v) else v for k, v in scores._asdict().items()}))
        return
    for name, value in scores._asdict().items():
        print(f"{name.replace('_', ' '):14} {value:,.4f}" if isinstance(value, float) else f"{name.replace('_', ' '):14} {value}")
