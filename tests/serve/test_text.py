"""Text of answers: in context, whole characters, stop strings across token borders."""

import pytest

from meshloom.serve.text import first_stop, settled, spoken, until_stop


class Pieces:
    """A tokenizer of given byte pieces, whose decoder drops a space at the start as SentencePiece's does."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special=False):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace").removeprefix(" ")


TOK = Pieces(b" Hel", b"lo", b" wor", b"ld", "é".encode()[:1], "é".encode()[1:], b".")


def test_an_answer_keeps_its_first_space():
    assert TOK.decode([2, 3]) == "world"
    assert spoken(TOK, [0, 1], [2, 3]) == " world"
    assert spoken(TOK, [0] * 50, [2]) == " wor"


def test_an_answer_to_half_a_character():
    assert spoken(TOK, [4], [5, 6]).endswith(".")


@pytest.mark.parametrize(
    "text,stops,want",
    [
        ("a\ufffd", (), "a"),
        ("one\nUs", ("\nUser:",), "one"),
        ("one\nUx", ("\nUser:",), "one\nUx"),
        ("abab", ("abc",), "ab"),
        ("", ("x",), ""),
    ],
)
def test_settled(text, stops, want):
    assert settled(text, stops) == want


def test_a_stop_string_may_cross_tokens():
    ids = [1, 2, 3, 6, 3]
    assert until_stop(TOK, [0], ids, ("o w",)) == 2
    assert until_stop(TOK, [0], ids, ("world.", "zzz")) == 4
    assert until_stop(TOK, [0], ids, ("Hello",)) == -1, "the prompt is not searched"


def test_first_stop():
    assert first_stop("a b c", ("c", "b")) == 2 and first_stop("a", ("b",)) == -1 and first_stop("a", ()) == -1
