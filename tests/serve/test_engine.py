"""Cached, batched and chunked decoding equals the full forward pass, under every layout."""

import functools

import jax
import numpy as np
import pytest

from meshloom.models import deepseek, gpt2, llama, moe
from meshloom.ops.rope import Rope
from meshloom.parallel.table import build
from meshloom.runner.forward import logits as full
from meshloom.serve.engine import serving
from meshloom.serve.sampling import Sampling, uses, wants
from serve.made import made_up, prepared

LAYOUTS = [
    "",
    "data=2",
    "zero1=2",
    "zero2=2",
    "zero3=4",
    "tensor=2",
    "tensor=4",
    "tensor=2 sequence",
    "zero3=2 tensor=2",
    "data=2 zero3=2 tensor=2 sequence",
    "tensor2d=2x2",
    "tensor2d=2x4",
    "tensor25d=2x2x2",
    "tensor3d=2x2x2",
    "context=2 ulysses=2",  # idle: the sequence is whole
    "context=2 tensor=2 sequence",
    "pipe=2",  # the stages share the rows
    "pipe=2 tensor=2 zero1=2",
]
ROTARY = Rope(theta=500.0, kind="llama3", factor=4.0, original=8)
SIZES = dict(layers=2, embed=16, heads=4, vocab=61, vocab_multiple=32, max_seq=64, init_std=0.3)
# the window (5) is shorter than any text here; kv_heads 2 and 1 are fewer than tensor=4; 61 is odd; the second is alternating and untied
WINDOW = llama.Config(**SIZES, variant="qwen3", qk_norm=True, qkv_bias=True, o_bias=True, kv_heads=2, ffn=32, window=5, rope=ROTARY)
MIXED = llama.Config(
    **{**SIZES, "layers": 2}, variant="qwen3", qk_norm=True, kv_heads=1, ffn=32, window=4, windowed_layers=(True, False), tied=False
)
EXPERTS = dict(experts=4, top=2, expert_ffn=8, shared=1)
SPARSE = moe.Config(**{**SIZES, "layers": 2}, **EXPERTS, kv_heads=2, ffn=32, moe_layers=(False, True), window=5)
LATENT = deepseek.Config(**{**SIZES, "layers": 2}, **EXPERTS, ffn=32, first_dense=1, key_rank=6, nope_head=4, rope_head=2, value_head=3)
MODELS = {
    "window": (llama.MODEL, WINDOW),
    "mixed": (llama.MODEL, MIXED),
    "gpt2": (gpt2.MODEL, gpt2.Config(**{**SIZES, "layers": 2})),
    "moe": (moe.MODEL, SPARSE),
    "deepseek": (deepseek.MODEL, LATENT),
}
LENGTHS, PROMPT, NEW, LENGTH = np.array([12, 5, 1, 9], np.int32), 12, 6, 20


@functools.cache
def reference(name):
    """Parameters, left-padded prompts, greedy tokens and logits by full forward passes of each row alone."""
    model, c = MODELS[name]
    params = made_up(model.specs(c))
    rows = [np.random.default_rng(n).integers(0, c.vocab, n) for n in LENGTHS]
    forward = jax.jit(lambda p, t: full(model, c, p, t))
    texts = np.zeros((len(rows), LENGTH), np.int32)
    for i, row in enumerate(rows):
        texts[i, : len(row)] = row
    scores = np.zeros((len(rows), NEW, c.vocab), np.float32)
    for step in range(NEW):
        out = np.asarray(forward(params, texts))
        for i, n in enumerate(LENGTHS):
            scores[i, step] = out[i, n + step - 1]
            texts[i, n + step] = scores[i, step].argmax()
    prompts = np.stack([np.concatenate([np.full(PROMPT - len(r), 7), r]) for r in rows]).astype(np.int32)
    return params, prompts, np.stack([texts[i, n : n + NEW] for i, n in enumerate(LENGTHS)]), scores


def decoded(name, spelling, chunk=PROMPT, gather="layer"):
    """Tokens, logits of every step, and log-probabilities, by the engine."""
    (model, c), (params, prompts, _, _) = MODELS[name], reference(name)
    engine, w = prepared(model, c, params, spelling, gather)
    asked = [Sampling(tokens=NEW)] * len(prompts)
    want, use = wants(asked, (), c.vocab), uses(asked)
    held, report = engine.start(w, prompts, LENGTHS, want, length=LENGTH, use=use, chunk=chunk)
    scores = [np.asarray(held.logits)]
    for step in range(1, NEW):
        held, report = engine.more(w, held, want, np.zeros(len(prompts), bool), np.int32(PROMPT + step), use=use)
        scores.append(np.asarray(held.logits))
    assert np.asarray(report.done).all() and (np.asarray(report.made) == NEW).all()
    return np.asarray(report.tokens)[:, PROMPT : PROMPT + NEW], np.stack(scores, 1), np.asarray(report.log_probs)[:, PROMPT : PROMPT + NEW]


@pytest.mark.parametrize("spelling", LAYOUTS)
def test_decoding_equals_the_full_forward_pass(spelling):
    tokens, scores, log_probs = decoded("window", spelling)
    _, _, want, exact = reference("window")
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_allclose(scores, exact, atol=1e-5, rtol=1e-5)
    raw = np.take_along_axis(np.asarray(jax.nn.log_softmax(exact)), want[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_probs, raw, atol=1e-5)


@pytest.mark.parametrize(
    "name,spelling",
    [("mixed", "tensor=4"), ("gpt2", "zero3=2 tensor=2"), ("moe", "expert=2:folded tensor=2"), ("deepseek", "expert=2 tensor=2")]
    + [(name, "") for name in ("mixed", "gpt2", "moe", "deepseek")],
)
def test_other_models(name, spelling):
    tokens, scores, _ = decoded(name, spelling)
    np.testing.assert_array_equal(tokens, reference(name)[2])
    np.testing.assert_allclose(scores, reference(name)[3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spelling,chunk", [("", 4), ("zero3=2 tensor=2", 6)])
def test_prompts_read_in_chunks(spelling, chunk):
    tokens, scores, _ = decoded("window", spelling, chunk)
    np.testing.assert_array_equal(tokens, reference("window")[2])
    np.testing.assert_allclose(scores, reference("window")[3], atol=1e-5, rtol=1e-5)


def test_zero3_gathered_once():
    tokens, scores, _ = decoded("window", "zero3=4", gather="once")
    np.testing.assert_array_equal(tokens, reference("window")[2])
    np.testing.assert_allclose(scores, reference("window")[3], atol=1e-5, rtol=1e-5)


def test_many_steps_in_one_call_equal_one_at_a_time():
    model, c = MODELS["window"]
    params, prompts, want, _ = reference("window")
    engine, w = prepared(model, c, params)
    asked = [Sampling(tokens=n) for n in (NEW, 2, 4, 1)]
    args, use = wants(asked, (), c.vocab), uses(asked)
    held, _ = engine.start(w, prompts, LENGTHS, args, length=LENGTH, use=use, chunk=PROMPT)
    held, report = engine.more(w, held, args, np.zeros(4, bool), np.int32(LENGTH - 1), use=use)
    assert list(report.made) == [NEW, 2, 4, 1] and int(held.slots.start) == PROMPT + NEW - 1
    for i, n in enumerate(report.made):
        np.testing.assert_array_equal(np.asarray(report.tokens)[i, PROMPT : PROMPT + n], want[i, :n])


def test_a_generation_layout_has_a_whole_sequence_and_no_gradients():
    lay = serving(build("zero2=2 tensor=2 sequence", MODELS["window"][1], LENGTH))
    assert "seq" not in lay.acts and lay.grad == lay.step and lay.acts["heads"] == ("tensor",)
