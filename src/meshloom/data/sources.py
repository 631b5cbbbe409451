"""Documents from files, in a fixed order: plain text, JSONL (plain, .gz, .zst), Parquet, a saved `datasets` folder, or a folder of any of these.

`documents` counts what is bad, and stops at the first or goes on, as data.on_bad says."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from meshloom.core.config import nearest
from meshloom.data.config import Source
from meshloom.data.readers import READERS, Found
from meshloom.data.report import KINDS, Bad, Document, Report

CORPUS = Path(__file__).parent / "corpus"
ENDINGS = {
    ".txt": "text",
    ".md": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "datasets",
}


@contextmanager
def plain(file: BinaryIO) -> Iterator[BinaryIO]:
    """A file that is not compressed."""
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
            raise ValueError(
                f"How should {path} be read? Its ending is not one of {', '.join(ENDINGS)} (with .gz or .zst). "
                "Set the source's format to text, jsonl or parquet."
            )
        return [path]
    if not path.is_dir():
        raise ValueError(_no_file(path))
    if (path / "dataset_dict.json").exists():
        parts = _described(path / "dataset_dict.json", lambda tree: [str(name) for name in tree["splits"]])
        example = f", such as {path / parts[0]}" if parts else ""
        raise ValueError(f"{path} holds several data sets: {', '.join(parts) or 'none'}. Give the path of one{example}.")
    if (path / "state.json").exists():
        return _described(path / "state.json", lambda tree: [path / f["filename"] for f in tree["_data_files"]])
    every = walk(path)
    found = [p for p in every if p.is_file() and _wanted(p, source)]
    if report is not None:
        wanted = set(found)
        report.other_files += [str(p.relative_to(path)) for p in every if p not in wanted]
    if not found:
        raise ValueError(
            f"Folder {path} holds no file that ends in {', '.join(ENDINGS)} (with .gz or .zst). It holds {len(every)} other files. "
            "Give another folder, or one file together with its format."
        )
    return found


def walk(folder: Path) -> list[Path]:
    """Every file below a folder, in the order of their paths: links to folders are followed, once each; names that begin with a dot are not."""
    seen, out, left = {os.path.realpath(folder)}, [], [folder]
    while left:
        for path in left.pop().iterdir():
            if path.name.startswith("."):
                continue
            if not path.is_dir():
                out.append(path)
            elif (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                left.append(path)
    return sorted(out)


def _described(file: Path, take: Callable[[Any], list]) -> list:
    """What one of the files holds with which `datasets` describes a folder.  Raises ValueError where it is damaged."""
    try:
        return take(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{file} is damaged ({type(e).__name__}: {e}). Save the data set again with Dataset.save_to_disk.") from e


def _no_file(path: Path) -> str:
    """What to say of a path that is neither a file nor a folder."""
    if os.path.islink(path):
        return f"{path} is a link to {os.readlink(path)}, which is not there. Mend the link, or give the path of the file itself."
    if path.exists():
        return f"{path} is no regular file, but a pipe or a device, which cannot be read twice. Write its contents to a file and give that."
    return f"There is no file or folder {path}.{near(path)}"


def _wanted(path: Path, source: Source) -> bool:
    """A README is about the data, not of it. Else the ending decides; where the format is given, unknown endings (.py, .tex) are of it."""
    named = format_of(path, source.model_copy(update={"format": "auto"}))
    fits = named is not None if source.format == "auto" else named in (None, source.format)
    return fits and not path.name.lower().startswith(("readme", "licence", "license"))


def near(path: Path) -> str:
    """A hint for a path that does not exist: the nearest name beside it."""
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside)
    return f" Did you mean {path.parent / close}?" if close else ""


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
    return isinstance(e, (EOFError, gzip.BadGzipFile, zlib.error)) or type(e).__name__ in ("ZstdError", "ArrowInvalid", "ArrowException")


def documents(sources: Sequence[Source], on_bad: str, max_bytes: int, report: Report) -> Iterator[Document]:
    """The documents of some sources, one source after another. on_bad: `stop` raises ValueError at the first bad one, `skip` counts it in the report.

    Raises ValueError where a source has no document at all."""
    for source in sources:
        before = report.documents
        for found in read(source, max_bytes, report):
            if isinstance(found, Bad):
                report.note(found)
                if on_bad == "stop":
                    raise ValueError(
                        f"{describe(found)}. Mend it, or set data.on_bad to skip: then such documents are counted and left out."
                    )
                continue
            report.documents += 1
            report.characters += len(found.text)
            yield found
        if report.documents == before:
            why = " ".join(line.strip() for line in report.lines()[1:])
            raise ValueError(f"Source '{source.path}' has no documents. {why}{' ' * bool(why)}Put text in it, or leave it out.")


def describe(bad: Bad) -> str:
    """A bad document as a clause: place, kind, meaning, detail."""
    return f"{bad.file}:{bad.line}: {bad.kind}: {KINDS[bad.kind]}{f' ({bad.detail})' if bad.detail else ''}"
