"""Documents from files, in a fixed order: plain text, JSONL (plain, .gz, .zst), Parquet, a saved `datasets` folder, or a folder of any of these.

Every reader yields a Document or a Bad, with file and line; nothing is left out without one. `documents` counts what is bad and stops or goes on."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from meshloom.data.config import Source

CORPUS = Path(__file__).parent / "corpus"
SHOWN = 5  # examples of each kind that a report keeps


class Document(NamedTuple):
    """One document and where it stood; line counts from 1 (in tables: the row)."""

    text: str
    file: str
    line: int


class Bad(NamedTuple):
    """Something that is not a document: its kind (a key of KINDS), place and detail."""

    kind: str
    file: str
    line: int
    detail: str


KINDS = {
    "broken JSON": "the line is not valid JSON",
    "not an object": "the line is JSON, but not an object with keys",
    "missing field": "the object or row lacks the field, or holds null in it",
    "wrong type": "the field holds something else than text",
    "empty": "the text is empty or only white space",
    "not UTF-8": "the bytes are not UTF-8, or the text holds half a surrogate pair",
    "too long": "the document has more bytes than data.max_bytes",
    "damaged file": "a compressed or binary file breaks off or is not of its kind",
}


class Report:
    """What was read: documents, and bad ones by kind with the first few places."""

    def __init__(self) -> None:
        self.documents, self.characters, self.blank_lines = 0, 0, 0
        self.finished, self.file = 0, None  # bytes of the files done with, and the one being read
        self.bad: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self.other_files: list[str] = []

    def position(self) -> int:
        """Bytes of the files read so far, as they lie on disk."""
        return self.finished + (self.file.tell() if self.file is not None and not self.file.closed else 0)

    def note(self, bad: Bad) -> None:
        """Counts a bad document, and keeps its place if it is among the first."""
        self.bad[bad.kind] += 1
        places = self.places.setdefault(bad.kind, [])
        if len(places) < SHOWN:
            places.append(f"{bad.file}:{bad.line} {bad.detail}".rstrip())

    def lines(self) -> list[str]:
        """The report as sentences: one for what was read, one a kind of trouble."""
        out = [f"{self.documents:,} documents, {self.characters:,} characters; {sum(self.bad.values()):,} skipped as bad"]
        out += [f"  {n:,} {kind} ({KINDS[kind]}): " + "; ".join(self.places[kind]) + (" ..." if n > SHOWN else "") for kind, n in self.bad.most_common()]
        out += [f"  {self.blank_lines:,} blank lines"] if self.blank_lines else []
        names = ", ".join(self.other_files[:SHOWN]) + (" ..." if len(self.other_files) > SHOWN else "")
        return out + ([f"  {len(self.other_files):,} files of other kinds left out: {names}"] if names else [])

    def facts(self) -> dict[str, Any]:
        """The report as plain JSON."""
        return {"documents": self.documents, "characters": self.characters, "blank_lines": self.blank_lines, "bad": dict(self.bad), "places": self.places, "other_files": self.other_files}


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
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as e:
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


READERS: dict[str, Callable[[BinaryIO, str, Source, int, Report], Found]] = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet, "datasets": read_arrow}
ENDINGS = {".txt": "text", ".md": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "datasets"}


@contextmanager
def plain(file: BinaryIO) -> Iterator[BinaryIO]:
    yield file


def gunzip(file: BinaryIO) -> Any:
    """A gzip file, opened."""
    return gzip.GzipFile(fileobj=file)


class Zstd(io.RawIOBase):
    """The plain bytes of a Zstandard file, of one frame or several. Unlike the library's own reader it raises EOFError where a frame breaks off."""

    def __init__(self, file: BinaryIO):
        self.file, self.frame, self.rest = file, None, b""

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer with the next bytes.  Returns how many; 0 at the end."""
        while not self.rest:
            raw = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
            raw = raw or self.file.read(1 << 17)
            if not raw:
                if self.frame is not None and not self.frame.eof:
                    raise EOFError("the Zstandard frame breaks off")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = _new_frame()
            self.rest = self.frame.decompress(raw)
        n = min(len(buffer), len(self.rest))
        buffer[:n], self.rest = self.rest[:n], self.rest[n:]
        return n


def _new_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def unzstd(file: BinaryIO) -> Any:
    """A Zstandard file, opened."""
    return io.BufferedReader(Zstd(file), 1 << 20)


OPENERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gunzip, ".zst": unzstd}


def format_of(path: Path, source: Source) -> str | None:
    """How a file is read: what the source says, else by its ending, None where that is unknown."""
    if source.format != "auto":
        return source.format
    suffixes = [s for s in path.suffixes if s not in OPENERS]
    return ENDINGS.get(suffixes[-1].lower()) if suffixes else None


def files_of(source: Source, report: Report | None = None) -> list[Path]:
    """The files of a source, in the order in which they are read (by path).

    `corpus` is the files that ship.  Raises ValueError for a path that does not exist, a folder of no known file, or a dictionary of `datasets`."""
    if source.path == "corpus":
        return sorted(CORPUS.glob("*.jsonl.zst"))
    path = Path(source.path).expanduser()
    if path.is_file():
        if format_of(path, source) is None:
            raise ValueError(f"How should {path} be read? Its ending is not one of {', '.join(ENDINGS)} (with .gz or .zst). Set the source's format to text, jsonl or parquet.")
        return [path]
    if not path.is_dir():
        raise ValueError(f"There is no file or folder {path}.{near(path)}")
    if (path / "dataset_dict.json").exists():
        parts = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{path} holds several data sets: {', '.join(parts)}. Give the path of one, such as {path / parts[0]}.")
    if (path / "state.json").exists():
        return [path / f["filename"] for f in json.loads((path / "state.json").read_text())["_data_files"]]
    every = sorted(p for p in path.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts))
    found = [p for p in every if _wanted(p, source)]
    if report is not None:
        report.other_files = [str(p.relative_to(path)) for p in every if p not in set(found)]
    if not found:
        raise ValueError(f"Folder {path} holds no file that ends in {', '.join(ENDINGS)} (with .gz or .zst). It holds {len(every)} other files.")
    return found


def _wanted(path: Path, source: Source) -> bool:
    """A README is about the data, not of it; everything else is decided by its ending."""
    named = format_of(path, source.model_copy(update={"format": "auto"}))
    return not path.name.lower().startswith(("readme", "licence", "license")) and named is not None and source.format in ("auto", named)


def near(path: Path) -> str:
    """A hint for a path that does not exist: the nearest name beside it."""
    import difflib

    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, 1, 0.6)
    return f" Did you mean {path.parent / close[0]}?" if close else ""


def read(source: Source, max_bytes: int, report: Report) -> Found:
    """All documents of a source and all that is bad in it, in order."""
    for path in files_of(source, report):
        kind = format_of(path, source) or "datasets"
        try:
            with path.open("rb") as raw, OPENERS.get(path.suffix, plain)(raw) as file:
                report.file = raw
                yield from READERS[kind](file, str(path), source, max_bytes, report)
        except PermissionError as e:
            raise ValueError(f"You may not read {path}. Change its permissions, or leave it out.") from e
        except Exception as e:
            if not is_damage(e):
                raise
            yield Bad("damaged file", str(path), 0, f"{type(e).__name__}: {e}; what came before it was read")
        report.finished += path.stat().st_size


def is_damage(e: Exception) -> bool:
    """Whether an error of a decompressor or of pyarrow speaks of the file's bytes."""
    import zlib

    return isinstance(e, (EOFError, gzip.BadGzipFile, zlib.error)) or type(e).__name__ in ("ZstdError", "ArrowInvalid", "ArrowException")


def documents(source: Source, on_bad: str, max_bytes: int, report: Report) -> Iterator[Document]:
    """The documents of a source. on_bad: `stop` raises ValueError at the first bad one, `skip` counts it in the report.

    Raises ValueError where the source has no document at all."""
    for found in read(source, max_bytes, report):
        if isinstance(found, Bad):
            report.note(found)
            if on_bad == "stop":
                raise ValueError(
                    f"{found.file}:{found.line}: {found.kind}: {KINDS[found.kind]}{f' ({found.detail})' if found.detail else ''}. "
                    f"Mend it, or set data.on_bad to skip: then such documents are counted and left out."
                )
            continue
        report.documents += 1
        report.characters += len(found.text)
        yield found
    if not report.documents:
        raise ValueError(f"Source '{source.path}' has no documents. " + " ".join(report.lines()[1:]).strip())
