"""`meshloom data`: text to token stores, a look into them, and tokenizers from the user's own text. No JAX here."""

from pathlib import Path
from typing import Literal

from cyclopts import App

from .cli_base import OK, Common

app = App(name="data", help="Prepare text, look into token stores, train a tokenizer.")
Format = Literal["auto", "text", "jsonl", "parquet", "datasets"]
Split = Literal["file", "line", "paragraph"]
OnBad = Literal["stop", "skip"]


@app.command
def prepare(
    source: str,
    /,
    *,
    out: Path,
    tokenizer: str = "shipped",
    field: str = "text",
    format: Format = "auto",
    split: Split = "file",
    on_bad: OnBad = "stop",
    workers: int | None = None,
    common: Common = Common(),
) -> int:
    """Turn text into a token store, with Megatron's file format.

    Parameters
    ----------
    source
        A file of text, JSONL (plain, .gz, .zst) or Parquet, a folder of them, or a saved datasets folder.
    out
        Prefix of the store: OUT.bin and OUT.idx are written.
    tokenizer
        A tokenizer.json, a Hugging Face tokenizer folder, or: shipped.
    field
        The JSON key or Parquet column that holds the text.
    format
        What the source is; decided by the endings of its files by default.
    split
        What one document is in plain text: the file, a line, or a paragraph.
    on_bad
        Stop at the first broken document, or skip and count them by kind.
    workers
        Processes that tokenize; one for each core by default. They do not change the result.
    """
    from .core.config import load
    from .data import prepare as worker
    from .data.config import Data, Source, Tokenizer
    from .data.tokenizer import load as load_tokenizer

    place = load(Source, {"path": source, "field": field, "format": format, "split": split})
    data = load(Data, {"on_bad": on_bad} | ({} if workers is None else {"workers": workers}))
    done = worker.prepare(place, load_tokenizer(tokenizer, load(Tokenizer, {"path": tokenizer})), data, str(out), progress=True)
    print("\n".join(done.report))
    print(f"{out} was made already from the same documents and tokenizer." if done.cached else f"{out}.bin and {out}.idx are written.")
    return OK


@app.command
def inspect(store: str, /, *, tokenizer: str = "shipped", samples: int = 3, show: int = 64, common: Common = Common()) -> int:
    """Show a store's counts, lengths and some decoded text.

    Parameters
    ----------
    store
        Prefix of a token store, or its .bin or .idx file.
    tokenizer
        The tokenizer to decode with.
    samples
        How many documents to decode.
    show
        How many tokens of each.
    """
    from .data import prepare as worker
    from .data.store import Store
    from .data.tokenizer import load as load_tokenizer

    prefix = store.removesuffix(".bin").removesuffix(".idx")
    print("\n".join(worker.inspect(Store(prefix), load_tokenizer(tokenizer), samples, show).lines()))
    return OK


@app.command
def tokenizer(
    source: str,
    /,
    *,
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
    source
        As for: meshloom data prepare.
    out
        The folder to write tokenizer.json into.
    vocab
        Tokens in all, control tokens and 256 bytes included.
    field
        The JSON key or Parquet column that holds the text.
    format
        What the source is.
    split
        What one document is in plain text.
    on_bad
        Stop at the first broken document, or skip and count them by kind.
    """
    from .core.config import load
    from .data import tokenizer as worker
    from .data.config import Data, Source
    from .data.sources import Report, documents

    place = load(Source, {"path": source, "field": field, "format": format, "split": split})
    report = Report()
    texts = (document.text for document in documents(place, on_bad, load(Data, {}).max_bytes, report))
    made = worker.train(texts, vocab, out, progress=True)
    print("\n".join(report.lines()))
    print(f"{out} holds a tokenizer of {made.size} tokens.")
    return OK
