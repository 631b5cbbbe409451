"""Answers of whole batches: lengths, end tokens, stop strings, batch mates, layouts."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from meshloom.models import llama
from meshloom.serve.answer import answers, bucket, check_room
from meshloom.serve.sampling import Sampling
from serve.made import made_up, prepared, zeros

C = llama.Config(layers=1, embed=16, heads=2, ffn=16, vocab=61, vocab_multiple=64, max_seq=64, init_std=0.4)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6, 7]]


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids, skip_special=False):
        return "".join(chr(64 + i) for i in ids)


@functools.cache
def ready(spelling=""):
    """Engine and weights of a random model."""
    return prepared(llama.MODEL, C, made_up(llama.specs(C), 0.4), spelling)


@functools.cache
def forced():
    """A model that always makes token 7, and 3 where it may not."""
    c = C.model_copy(update={"tied": False})
    params = zeros(llama.specs(c))
    params = dataclasses.replace(params, embed=params.embed + 1, norm=params.norm + 1)
    params.head[7], params.head[3] = 1, 0.5
    return prepared(llama.MODEL, c, params)


def write(prompts, requests, ends=(), every=0, which=None, spelling=""):
    """The last of the yields."""
    engine, w = which or ready(spelling)
    *_, last = answers(engine, w, Letters(), prompts, requests, ends, every)
    return last


def test_a_request_does_not_depend_on_its_batch():
    asked = [Sampling(tokens=9, temperature=0.7, seed=s, top_k=20) for s in range(4)]
    together = write(PROMPTS, asked)
    alone = [write([p], [a])[0] for p, a in zip(PROMPTS, asked)]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    turned = write(PROMPTS[::-1], asked[::-1])[::-1]
    assert [a.tokens for a in turned] == [a.tokens for a in together]
    assert together[0].tokens != together[3].tokens, "one prompt, two seeds"
    assert [a.tokens for a in write(PROMPTS, asked, every=2)] == [a.tokens for a in together], "streamed"


def test_rows_that_do_not_divide_and_drawn_tokens_under_a_layout():
    asked = [Sampling(tokens=7, temperature=0.9, seed=s, repetition_penalty=1.2) for s in range(3)]
    want = write(PROMPTS[:3], asked)
    got = write(PROMPTS[:3], asked, spelling="zero3=2 tensor=2")
    assert [(a.tokens, a.finish) for a in got] == [(a.tokens, a.finish) for a in want]
    np.testing.assert_allclose(got[2].log_probs, want[2].log_probs, atol=1e-5)


def test_any_of_several_end_tokens_ends():
    (found,) = write([[1, 2]], [Sampling(tokens=6)], ends=(2, 7), which=forced())
    assert (found.tokens, found.finish, found.text) == ((7,), "end", "G")


def test_min_tokens_holds_the_end_back():
    (found,) = write([[1, 2]], [Sampling(tokens=6, min_tokens=4)], ends=(2, 7), which=forced())
    assert (found.tokens, found.finish) == ((3, 3, 3, 3, 7), "end") and 4 <= len(found.tokens) <= 6


def test_ignored_end_tokens():
    (found,) = write([[1, 2]], [Sampling(tokens=6, ignore_end=True)], ends=(7,), which=forced())
    assert (found.tokens, found.finish) == ((7,) * 6, "length")


def test_a_stop_string_ends_one_row_and_leaves_the_others():
    asked = [Sampling(tokens=20, stop=("GGG",)), Sampling(tokens=5), Sampling(tokens=40, stop=("X", "GGGGG"))]
    found = write([[1], [2, 3], [4]], asked, which=forced())
    assert [(len(a.tokens), a.text, a.finish) for a in found] == [(3, "", "stop"), (5, "GGGGG", "length"), (5, "", "stop")]


def test_a_stream_never_takes_text_back():
    engine, w = ready()
    asked = [Sampling(tokens=24, temperature=1.0, seed=3, stop=("ZZ", "KLM"))]
    texts = [found.text for (found,) in answers(engine, w, Letters(), [[5]], asked, (), 3)]
    assert len(texts) > 3 and all(after.startswith(before) for before, after in itertools.pairwise(texts))


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    """A uniform model over 61 tokens, padded to 64: log-probability -ln 61, and 2,000 draws at T=2 have no other id."""
    asked = [Sampling(tokens=50, temperature=2.0, seed=s) for s in range(40)]
    found = write([[1]] * 40, asked, which=prepared(llama.MODEL, C, zeros(llama.specs(C))))
    ids = {i for a in found for i in a.tokens}
    assert max(ids) < 61 and len(ids) == 61
    np.testing.assert_allclose(found[0].log_probs, -np.log(61), rtol=1e-5)


@pytest.mark.parametrize(
    "size,tokens,words",
    [
        (0, 1, "Prompt 1 has no tokens"),
        (64, 1, "has 64 tokens, and the model's context is 64. Shorten it to 63"),
        (65, 1, "has 65 tokens"),
        (60, 10, "with 10 new ones it would have 70, and the model's context is 64. Ask for at most 4"),
    ],
)
def test_refusals(size, tokens, words):
    with pytest.raises(ValueError, match=words):
        check_room(64, [[1] * size], [Sampling(tokens=tokens)])


def test_a_text_may_fill_the_context():
    check_room(64, [[1] * 63], [Sampling(tokens=1)])
    (found,) = write([[1] * 63], [Sampling(tokens=1)])
    assert len(found.tokens) == 1


def test_buckets_are_few_and_close():
    sizes = {bucket(n) for n in range(1, 4097)}
    assert len(sizes) < 40 and all(n <= bucket(n) <= max(16, n + 16, 1.25 * n + 1) for n in range(1, 4097))
    assert all(bucket(n) % 512 == 0 for n in range(600, 4097) if bucket(n) > 2048)
