"""What was read from a source: a Document, or a Bad one with file, line and kind. A Report counts both, so that nothing is left out in silence."""

from collections import Counter
from typing import Any, BinaryIO, NamedTuple

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
        self.finished = 0  # bytes of the files done with
        self.file: BinaryIO | None = None  # the one being read
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
        out += [
            f"  {n:,} {kind} ({KINDS[kind]}): " + "; ".join(self.places[kind]) + (" ..." if n > SHOWN else "")
            for kind, n in self.bad.most_common()
        ]
        out += [f"  {self.blank_lines:,} blank lines"] if self.blank_lines else []
        names = ", ".join(self.other_files[:SHOWN]) + (" ..." if len(self.other_files) > SHOWN else "")
        return out + ([f"  {len(self.other_files):,} files of other kinds left out: {names}"] if names else [])

    def facts(self) -> dict[str, Any]:
        """The report as plain JSON."""
        return {
            "documents": self.documents,
            "characters": self.characters,
            "blank_lines": self.blank_lines,
            "bad": dict(self.bad),
            "places": self.places,
            "other_files": self.other_files,
        }
