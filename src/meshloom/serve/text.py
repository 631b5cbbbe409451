"""From token ids to the text of an answer: decoding in context, characters that are not whole yet, stop strings."""

from collections.abc import Sequence
from typing import Any

TAIL = 8
"""Tokens of the prompt that are decoded with an answer: a decoder may strip the space before the first token that it is given."""
BROKEN = "\ufffd"


def spoken(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to a prompt, control tokens left out.  tokenizer: anything with decode(ids, skip_special)."""
    tail = list(prompt[-TAIL:])
    before, after = tokenizer.decode(tail, True), tokenizer.decode([*tail, *ids], True)
    return after[len(before) :] if after.startswith(before) else tokenizer.decode(list(ids), True)


def first_stop(text: str, stops: Sequence[str]) -> int:
    """Where the first of the stop strings begins, -1 if none appears."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)


def settled(text: str, stops: Sequence[str]) -> str:
    """The part of an unfinished text that later tokens cannot change: without a broken last character, or the beginning of a stop string."""
    text = text.rstrip(BROKEN)
    held = max((n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held]


def until_stop(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], stops: Sequence[str]) -> int:
    """The fewest of `ids` whose text holds a stop string; -1 if all of them do not."""
    if first_stop(spoken(tokenizer, prompt, ids), stops) < 0:
        return -1
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if first_stop(spoken(tokenizer, prompt, ids[:middle]), stops) >= 0 else (middle, high)
    return high
