import io

import pytest

from meshloom.data.config import Source
from meshloom.data.readers import READERS, parse, raw_lines
from meshloom.data.report import Bad, Document, Report


def read(kind, raw, max_bytes=1000, report=None, **source):
    return list(READERS[kind](io.BytesIO(raw), "f", Source(path="f", **source), max_bytes, report or Report()))


GOOD = b'{"text": "good"}'


@pytest.mark.parametrize(
    "line, kind, detail",
    [
        (b'{"text": "cut', "broken JSON", "Unterminated string"),
        (b"[" * 100000, "broken JSON", ""),
        (b'{"text": ' + b"9" * 5000 + b"}", "broken JSON", ""),
        (b'["text"]', "not an object", "a list"),
        (b'"text"', "not an object", "a str"),
        (b'{"content": "x", "id": 1}', "missing field", "no 'text'; its keys: content, id"),
        (b'{"text": null}', "missing field", "no 'text'"),
        (b'{"text": 5}', "wrong type", "'text' is int"),
        (b'{"text": ["a"]}', "wrong type", "'text' is list"),
        (b'{"text": ""}', "empty", ""),
        (b'{"text": " \\n\\t "}', "empty", ""),
        (b'{"text": "\xff\xfe"}', "not UTF-8", "byte 0xff at offset 10"),
        (b'{"text": "\\ud800"}', "not UTF-8", "lone surrogate at character 0"),
        (b'{"text": "' + b"x" * 200000 + b'"}', "too long", "200,013 bytes"),
    ],
)
def test_bad_lines_have_kind_line_and_detail(line, kind, detail):
    max_bytes = 150000
    found = read("jsonl", GOOD + b"\n" + line + b"\n" + GOOD + b"\n", max_bytes=max_bytes)
    assert [type(f) for f in found] == [Document, Bad, Document]
    bad = found[1]
    assert (bad.kind, bad.file, bad.line) == (kind, "f", 2) and detail in bad.detail
    assert found[2].line == 3


def test_text_longer_than_allowed_inside_a_short_enough_line():
    assert parse('{"text": "\\u00e4bc"}', "text", ("f", 1), 3).kind == "too long"  # 4 bytes of UTF-8
    assert parse('{"text": "\\u00e4bc"}', "text", ("f", 1), 4).text == "äbc"


def test_blank_lines_are_counted_and_no_documents():
    report = Report()
    assert len(read("jsonl", b"\n" + GOOD + b"\r\n   \n" + GOOD, report=report)) == 2
    assert report.blank_lines == 2


def test_a_byte_order_mark_is_dropped():
    assert read("jsonl", b"\xef\xbb\xbf" + GOOD)[0].text == "good"
    assert read("text", b"\xef\xbb\xbfabc")[0].text == "abc"


def test_another_field():
    assert read("jsonl", b'{"body": "b", "text": 1}', field="body")[0].text == "b"


def test_long_lines_are_not_kept_in_memory():
    class Endless(io.RawIOBase):
        """A line of 64 MB."""

        def __init__(self):
            self.left, self.largest = 64 << 20, 0

        def readline(self, n=-1):
            self.largest = max(self.largest, n)
            n = min(n, self.left)
            self.left -= n
            return b"x" * n

    file = Endless()
    found = list(raw_lines(file, "f", 1000))
    assert len(found) == 1 and found[0][1].kind == "too long" and "67,108,864" in found[0][1].detail and file.largest <= 1 << 20


@pytest.mark.parametrize(
    "split, expected",
    [
        ("file", [("one\ntwo\n\n\nthree\n", 1)]),
        ("line", [("one", 1), ("two", 2), ("three", 5)]),
        ("paragraph", [("one\ntwo", 1), ("three", 5)]),
    ],
)
def test_text_splits(split, expected):
    assert [(d.text, d.line) for d in read("text", b"one\ntwo\n\n\nthree\n", split=split)] == expected


@pytest.mark.parametrize(
    "split, kinds", [("file", ["too long"]), ("line", [None, "too long", None]), ("paragraph", [None, "too long", None])]
)
def test_long_text(split, kinds):
    found = read("text", b"ab\n\n" + b"x" * 50 + b"\n\ncd\n", max_bytes=20, split=split)
    assert [getattr(f, "kind", None) for f in found] == kinds


def test_long_paragraph_of_short_lines():
    found = read("text", b"ab\n" * 1000 + b"\ncd", max_bytes=100, split="paragraph")
    assert [getattr(f, "kind", None) for f in found] == ["too long", None]


@pytest.mark.parametrize(
    "split, kinds", [("file", ["not UTF-8"]), ("line", [None, "not UTF-8", None]), ("paragraph", [None, "not UTF-8", None])]
)
def test_text_that_is_not_utf8(split, kinds):
    assert [getattr(f, "kind", None) for f in read("text", b"ab\n\xff\ncd", split=split)] == kinds


def test_an_empty_file_is_an_empty_document():
    assert read("text", b"")[0].kind == "empty"
    assert read("jsonl", b"") == []
