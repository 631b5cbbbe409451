"""`meshloom data`: text to token stores, a look into them, and tokenizers from the user's own text. No JAX here."""

from pathlib import Path
from typing import Literal

from cyclopts import App

from meshloom.cli_base import OK, Common

app = App(name="data", help="Prepare text, look into token stores, train a tokenizer.")
Format = Literal["auto", "text", "jsonl", "parquet", "datasets"]
Split = Literal["file", "line", "paragraph"]
OnBad = Literal["stop", "skip"]


@app.command
def prepare(
    *sources: str,
    out: Path,
    tokenizer: str = "shipped",
    field: str = "text",
    format: Format = "auto",
    split: Split = "file",
    on_bad: OnBad = "stop",
    workers: int | None = None,
    common: Common = Common(),
) -> int:
    """Turn text into a token store, in Megatron's file format.

    Parameters
    ----------
    sources
        Text, JSONL (plain, .gz, .zst) or Parquet files, folders of them, or saved datasets folders.
    out
        Prefix of the store: OUT.bin and OUT.idx are written.
    tokenizer
        A tokenizer.json, a Hugging Face tokenizer folder, or: shipped.
    field
        The JSON key or Parquet column that holds the text.
    format
        What the sources are; decided by their endings by default.
    split
        What one document is in plain text: the file, a line, or a paragraph.
    on_bad
        Stop at the first broken document, or skip and count them by kind.
    workers
        Processes that tokenize; one for each core by default.
    """
    if not sources:
        raise ValueError("There is nothing to prepare. Name at least one file or folder.")
    from meshloom.core.config import load
    from meshloom.data import prepare as worker
    from meshloom.data.config import Data, Tokenizer

    given = [{"path": path, "field": field, "format": format, "split": split} for path in sources]
    own = {"train": given, "on_bad": on_bad} | ({} if workers is None else {"workers": workers})
    worker.show(worker.prepare(load(Data, own), load(Tokenizer, {"path": tokenizer}), out))
    return OK


@app.command
def inspect(store: str, /, *, sample: int = 1, seed: int = 0, common: Common = Common()) -> int:
    """Show a store's counts, lengths and some decoded text.

    Parameters
    ----------
    store
        Prefix of a token store (or its .bin or .idx file).
    sample
        How many documents to decode.
    seed
        Which ones.
    """
    from meshloom.data import inspect as worker

    worker.show(store, sample=sample, seed=seed)
    return OK


@app.command
def tokenizer(
    *sources: str,
    out: Path,
    vocab: int = 4096,
    field: str = "text",
    format: Format = "auto",
    split: Split = "file",
    on_bad: OnBad = "stop",
    common: Common = Common(),
) -> int:
    """Train a byte-level BPE tokenizer on your own text.

    Parameters
    ----------
    sources
        As for: meshloom data prepare.
    out
        The folder to write tokenizer.json into.
    vocab
        Tokens in all, control tokens and 256 bytes included.
    field
        The JSON key or Parquet column that holds the text.
    format
        What the sources are.
    split
        What one document is in plain text.
    on_bad
        Stop at the first broken document, or skip and count them by kind.
    """
    if not sources:
        raise ValueError("There is nothing to train on. Name at least one file or folder.")
    from meshloom.core.config import load
    from meshloom.data import prepare as worker
    from meshloom.data.config import Data

    given = [{"path": path, "field": field, "format": format, "split": split} for path in sources]
    worker.train_tokenizer(load(Data, {"train": given, "on_bad": on_bad}), vocab, out)
    return OK
