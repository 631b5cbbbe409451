"""A batch of prompts from token ids to answers: padding, the calls to the device, why each answer ended."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshloom.core.tree import Tree
from meshloom.serve.engine import Engine, Report
from meshloom.serve.sampling import Sampling, Wants, uses, wants
from meshloom.serve.text import first_stop, settled, spoken, until_stop

CHUNK = 512
"""Prompt tokens read at once: bounds the memory of the scores."""
EVERY = 16
"""New tokens between two looks at the text, where somebody looks."""


class Answer(NamedTuple):
    """What one prompt got. tokens: with the end token, if there was one. text: without it, and before a stop string. log_probs: natural log of each
    token's probability under the raw model, before penalty, temperature and cuts. finish: `end` (an end token), `stop` (a stop string), `length`
    (as many tokens as asked for), or "" while it is being made; then `text` is the part that will not change."""

    tokens: tuple[int, ...]
    text: str
    log_probs: tuple[float, ...]
    finish: str


def check_room(max_seq: int, prompts: Sequence[Sequence[int]], requests: Sequence[Sampling]) -> None:
    """Refuses a prompt that is empty, or that leaves no room for the new tokens asked for: both together must fit into max_seq."""
    for i, (prompt, asked) in enumerate(zip(prompts, requests)):
        name, size = f"Prompt {i + 1}", len(prompt)
        if not size:
            raise ValueError(f"{name} has no tokens. Give it at least one.")
        if size >= max_seq:
            raise ValueError(f"{name} has {size} tokens, and the model's context is {max_seq}. Shorten it to {max_seq - 1} or fewer.")
        if size + asked.tokens > max_seq:
            raise ValueError(
                f"{name} has {size} tokens; with {asked.tokens} new ones it would have {size + asked.tokens}, and the model's context is {max_seq}. "
                f"Ask for at most {max_seq - size} new tokens, or shorten the prompt."
            )


def bucket(n: int, chunk: int = CHUNK) -> int:
    """A size of at least n out of few: lengths in one bucket share a compiled program. At most a quarter of it is padding, above 64."""
    step = min(chunk, max(16, 1 << max(0, n.bit_length() - 3)))
    return -(-n // step) * step


def answers(
    engine: Engine,
    weights: Tree,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    requests: Sequence[Sampling],
    ends: Sequence[int],
    every: int = 0,
    chunk: int = CHUNK,
) -> Iterator[list[Answer]]:
    """The answers to prompts of any lengths, decoded together; each does not depend on the others.  ends: token ids that end a text.
    every: new tokens between two yields; 0 yields once, at the end.  Each yield holds all answers so far.
    Raises ValueError for a prompt that is empty or too long."""
    check_room(engine.config.max_seq, prompts, requests)
    if any(s.stop for s in requests) and not every:
        *_, last = answers(engine, weights, tokenizer, prompts, requests, ends, EVERY, chunk)
        yield last
        return
    size = bucket(max(map(len, prompts)), chunk)
    chunk = min(chunk, size)
    most = max(s.tokens for s in requests)
    rows = padded(engine, prompts, requests, ends, size)
    halt, use = np.zeros(len(rows.lengths), bool), uses(requests)
    held, report = engine.start(weights, rows.tokens, rows.lengths, rows.wants, length=bucket(size + most), use=use, chunk=chunk)
    until = size
    while True:
        until = min(until + (every or most), size + most - 1)
        held, report = engine.more(weights, held, rows.wants, halt, np.int32(until), use=use)
        seen = Report(*map(np.asarray, (report.tokens, report.log_probs, report.made, report.done)))
        found = [answer(tokenizer, prompts[i], requests[i], ends, seen, i, size) for i in range(len(prompts))]
        yield found
        halt = np.array([bool(a.finish) for a in found] + [True] * (len(halt) - len(found)))
        if halt.all():
            return


class Rows(NamedTuple):
    """Prompts as arrays: tokens [batch, size], padded on the left and with empty rows; lengths [batch]; what each asks for."""

    tokens: np.ndarray
    lengths: np.ndarray
    wants: Wants


def padded(engine: Engine, prompts: Sequence[Sequence[int]], requests: Sequence[Sampling], ends: Sequence[int], size: int) -> Rows:
    """The prompts with as many empty rows as the batch's mesh axes need."""
    batch = engine.layout.even(len(prompts))
    tokens, lengths = np.zeros((batch, size), np.int32), np.zeros(batch, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, size - len(prompt) :], lengths[i] = prompt, len(prompt)
    asked = [*requests, *[Sampling()] * (batch - len(prompts))]
    return Rows(tokens, lengths, wants(asked, ends, engine.config.vocab))


def answer(tokenizer: Any, prompt: Sequence[int], asked: Sampling, ends: Sequence[int], seen: Report, row: int, size: int) -> Answer:
    """One row's answer so far."""
    made = int(seen.made[row])
    ids = [int(i) for i in seen.tokens[row, size : size + made]]
    stopped = until_stop(tokenizer, prompt, ids, asked.stop) if asked.stop else -1
    finish = ("end" if ids[-1] in ends and not asked.ignore_end else "length") if seen.done[row] else ""
    if stopped >= 0:
        ids, finish = ids[:stopped], "stop"
    text = spoken(tokenizer, prompt, ids)
    if finish == "stop":
        text = text[: first_stop(text, asked.stop)]
    text = text if finish else settled(text, asked.stop)
    return Answer(tuple(ids), text, tuple(float(x) for x in seen.log_probs[row, size : size + len(ids)]), finish)
