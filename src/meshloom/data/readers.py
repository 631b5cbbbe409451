"""The formats: each reader takes an open binary file and yields its documents, and what is bad in it, with the line (in tables: the row)."""

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from meshloom.data.config import Source
from meshloom.data.report import Bad, Document, Report

Found = Iterator[Document | Bad]


def check_text(text: Any, field: str, place: tuple[str, int], max_bytes: int) -> Document | Bad:
    """A Document if `text` is one, else why not."""
    if text is None:
        return Bad("missing field", *place, f"no '{field}'")
    if not isinstance(text, str):
        return Bad("wrong type", *place, f"'{field}' is {type(text).__name__}, not text")
    if not text or text.isspace():
        return Bad("empty", *place, "")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as e:
        return Bad("not UTF-8", *place, f"lone surrogate at character {e.start}")
    return Bad("too long", *place, f"{size:,} bytes") if size > max_bytes else Document(text, *place)


def decode(raw: bytes, place: tuple[str, int]) -> str | Bad:
    """Bytes as text; a byte-order mark at the start of a file is dropped."""
    try:
        return raw.decode("utf-8-sig" if place[1] == 1 else "utf-8")
    except UnicodeDecodeError as e:
        return Bad("not UTF-8", *place, f"byte 0x{raw[e.start]:02x} at offset {e.start}")


def raw_lines(file: BinaryIO, name: str, max_bytes: int) -> Iterator[tuple[int, bytes | Bad]]:
    """Lines with their numbers. A longer one than max_bytes is skipped unread into memory, as a Bad."""
    number = 0
    while line := file.readline(max_bytes + 2):
        number += 1
        size = len(line)
        if size > max_bytes + 1 or (size == max_bytes + 1 and not line.endswith(b"\n")):
            while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                size += len(line)
            yield number, Bad("too long", name, number, f"{size:,} bytes")
        else:
            yield number, line


def read_jsonl(file: BinaryIO, name: str, source: Source, max_bytes: int, report: Report) -> Found:
    """One JSON object a line; blank lines are counted, and are no documents."""
    for number, raw in raw_lines(file, name, max_bytes):
        place = (name, number)
        line = raw if isinstance(raw, Bad) else decode(raw, place)
        if isinstance(line, Bad):
            yield line
        elif not line.strip():
            report.blank_lines += 1
        else:
            yield parse(line, source.field, place, max_bytes)


def parse(line: str, field: str, place: tuple[str, int], max_bytes: int) -> Document | Bad:
    """The document in one line of JSON."""
    try:
        value = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as e:
        return Bad("broken JSON", *place, f"{e.msg}, column {e.colno}")
    except (ValueError, RecursionError) as e:  # ValueError also for numbers of thousands of digits
        return Bad("broken JSON", *place, str(e))
    if not isinstance(value, dict):
        return Bad("not an object", *place, f"a {type(value).__name__}")
    if field not in value:
        return Bad("missing field", *place, f"no '{field}'; its keys: {', '.join(list(value)[:6])}")
    return check_text(value[field], field, place, max_bytes)


def read_text(file: BinaryIO, name: str, source: Source, max_bytes: int, report: Report) -> Found:
    """Plain text, cut in documents as source.split says."""
    return SPLITS[source.split](file, name, max_bytes, report)


def by_file(file: BinaryIO, name: str, max_bytes: int, report: Report) -> Found:
    """The whole file is one document."""
    raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        yield Bad("too long", name, 1, f"more than {max_bytes:,} bytes in one document; set the source's split to line or paragraph")
        return
    text = decode(raw, (name, 1))
    yield text if isinstance(text, Bad) else check_text(text, "text", (name, 1), max_bytes)


def by_line(file: BinaryIO, name: str, max_bytes: int, report: Report) -> Found:
    """Every line that is not blank is a document."""
    for number, raw in raw_lines(file, name, max_bytes):
        line = raw if isinstance(raw, Bad) else decode(raw, (name, number))
        if isinstance(line, Bad):
            yield line
        elif line.strip():
            yield check_text(line.rstrip("\r\n"), "text", (name, number), max_bytes)
        else:
            report.blank_lines += 1


def by_paragraph(file: BinaryIO, name: str, max_bytes: int, report: Report) -> Found:
    """Every run of lines between blank lines is a document; a bad line ends the one before it."""
    kept: list[str] = []
    start = size = 0

    def close() -> Found:
        if kept:
            yield check_text("".join(kept).rstrip("\r\n"), "text", (name, start), max_bytes)

    for number, raw in raw_lines(file, name, max_bytes):
        line = raw if isinstance(raw, Bad) else decode(raw, (name, number))
        if isinstance(line, Bad) or not line.strip():
            yield from close()
            kept.clear()
            if isinstance(line, Bad):
                yield line
        else:
            if not kept:
                start, size = number, 0
            size += len(line)
            if size <= 2 * max_bytes:  # what is more is too long already, and is not kept
                kept.append(line)
    yield from close()


SPLITS: dict[str, Callable[[BinaryIO, str, int, Report], Found]] = {"file": by_file, "line": by_line, "paragraph": by_paragraph}


def read_parquet(file: BinaryIO, name: str, source: Source, max_bytes: int, report: Report) -> Found:
    """One row a document, read in batches of rows."""
    parquet = needs_pyarrow("pyarrow.parquet", name)
    table = parquet.ParquetFile(file)
    return read_batches(table.iter_batches(1024, columns=column(table.schema_arrow.names, name, source)), name, source, max_bytes)


def read_arrow(file: BinaryIO, name: str, source: Source, max_bytes: int, report: Report) -> Found:
    """One file of a folder that `Dataset.save_to_disk` wrote: an Arrow stream."""
    ipc = needs_pyarrow("pyarrow.ipc", name)
    stream = ipc.open_stream(file)
    column(stream.schema.names, name, source)
    return read_batches((b.select([source.field]) for b in stream), name, source, max_bytes)


def needs_pyarrow(module: str, name: str) -> Any:
    """Imports a part of pyarrow, which is an extra."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ValueError(f"Reading {name} needs the package pyarrow, which is not installed. Run: pip install pyarrow") from e


def column(names: list[str], file: str, source: Source) -> list[str]:
    """The column with the text.  Raises ValueError where the table has none of that name: then no row has it."""
    if source.field not in names:
        raise ValueError(f"{file} has no column '{source.field}'. Its columns: {', '.join(names)}. Set the source's field to one of them.")
    return [source.field]


def read_batches(batches: Any, name: str, source: Source, max_bytes: int) -> Found:
    """The rows of Arrow record batches of one column."""
    row = 0
    for batch in batches:
        values = batch.column(0)
        try:
            texts = values.to_pylist()
        except UnicodeDecodeError:
            texts = None
        for i in range(len(values)):
            row += 1
            try:
                yield check_text(texts[i] if texts is not None else values[i].as_py(), source.field, (name, row), max_bytes)
            except UnicodeDecodeError as e:
                yield Bad("not UTF-8", name, row, f"at offset {e.start}")


READERS: dict[str, Callable[[BinaryIO, str, Source, int, Report], Found]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "datasets": read_arrow,
}
