"""Text from a folder on disk and from a model in training."""

import io
import json
from pathlib import Path

import jax
import pytest

from meshloom.core.mesh import make_mesh, shardings
from meshloom.data import tokenizer as tokenizers
from meshloom.models import llama
from meshloom.parallel.table import build
from meshloom.serve import generate
from meshloom.serve.answer import answers
from meshloom.serve.sampling import Sampling
from meshloom.weights import hf
from meshloom.weights.opened import open_model
from serve.made import made_up, prepared

TEXTS = ["the cat", "a"]


@pytest.fixture(scope="module")
def shipped():
    return tokenizers.load()


@pytest.fixture(scope="module")
def config(shipped):
    return llama.Config(layers=1, embed=16, heads=2, ffn=16, vocab=shipped.size, max_seq=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, config):
    """A Hugging Face folder with two end tokens in generation_config.json and one in config.json."""
    path = tmp_path_factory.mktemp("model") / "hf"
    said = {"eos_token_id": 2}
    hf.save(
        path,
        llama.MODEL,
        config,
        made_up(llama.specs(config), 0.3),
        said=said,
        generation={"eos_token_id": [2, 7]},
        tokenizer=tokenizers.SHIPPED,
    )
    return path


def test_a_folder_writes_the_same_alone_and_streamed(folder):
    asked = Sampling(tokens=12, temperature=0.8, top_p=0.95, seed=4)
    found = generate.generate_text(folder, TEXTS, asked)
    assert all(len(a.tokens) == 12 and a.finish == "length" and a.text for a in found)
    out = io.StringIO()
    answer = generate.stream(folder, TEXTS[0], asked, out, every=5)
    assert answer.tokens == found[0].tokens
    assert out.getvalue() == TEXTS[0] + answer.text + "\n"


def test_generation_config_wins(folder):
    assert generate.speaker(folder).ends == (2, 7)


def test_a_model_in_training_under_a_layout(shipped, config):
    params = made_up(llama.specs(config), 0.3)
    asked = Sampling(tokens=8, temperature=0.8, seed=1)
    want = generate.sampler(llama.MODEL, config, None, build("", config, 64), shipped, TEXTS, asked)(params)
    assert len(want) == 2 and all(want)
    lay = build("zero3=2 tensor=2 sequence", config, 64)
    mesh = make_mesh(lay)
    write = generate.sampler(llama.MODEL, config, mesh, lay, shipped, TEXTS, asked)
    assert write(jax.device_put(params, shardings(mesh, lay, "rest", llama.specs(config)))) == want


def test_a_sample_in_training_never_outgrows_the_context(shipped, config):
    write = generate.sampler(llama.MODEL, config, None, build("", config, 64), shipped, ["word " * 90], Sampling(tokens=500))
    assert len(write(made_up(llama.specs(config), 0.3))) == 1
    assert generate.sampler(llama.MODEL, config, None, build("", config, 64), shipped, [], Sampling())(None) == []


def test_encode(shipped):
    assert generate.encode(shipped, "") == [shipped.end]
    assert generate.encode(shipped, "cat") == shipped.encode("cat")
    begun = tokenizers.load(config=tokenizers.TokenizerSection(bos=True))
    begun.bos = 3
    assert generate.encode(begun, "cat") == [3, *shipped.encode("cat")]


def test_one_seed_a_prompt():
    assert [s.seed for s in generate.requests(Sampling(seed=2**32 - 1), 3)] == [2**32 - 1, 0, 1]


def test_show():
    answer = generate.Answer((5,), " sat", (-0.5,), "length")
    out = io.StringIO()
    generate.show(["a", "b"], [answer, answer], out=out)
    assert out.getvalue() == "a sat\n\nb sat\n"
    out = io.StringIO()
    generate.show(["a"], [answer], True, out)
    assert json.loads(out.getvalue()) == {"prompt": "a", "text": " sat", "tokens": [5], "log_probs": [-0.5], "finish": "length"}


def test_refusals(tmp_path, config):
    with pytest.raises(FileNotFoundError, match="There is no .*Give the folder of a run"):
        generate.speaker(tmp_path / "none")
    hf.save(tmp_path / "bare", llama.MODEL, config, made_up(llama.specs(config)))
    with pytest.raises(ValueError, match="has no tokenizer beside it"):
        generate.speaker(tmp_path / "bare")
    small = config.model_copy(update={"vocab": 100})
    hf.save(tmp_path / "small", llama.MODEL, small, made_up(llama.specs(small)), tokenizer=tokenizers.SHIPPED)
    with pytest.raises(ValueError, match="vocabulary has 100 entries"):
        generate.speaker(tmp_path / "small")


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gpt2", "neox", "llama_llama3", "mistral", "qwen3_windows_biases", "smollm3"])
def test_greedy_text_and_penalty_equal_transformers(name):
    """Tokens behind two prompts of unequal lengths."""
    import torch
    import transformers

    path = Path(__file__).parents[1] / "goldens" / "models" / name
    found = open_model(path)
    engine, w = prepared(found.model, found.config, found.weights(None))
    prompts = [list(range(3, 20)), [9, 50, 7]]
    (got,) = answers(engine, w, Ids(), prompts, [Sampling(tokens=20, min_tokens=20, repetition_penalty=1.2)] * 2, (2,))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    asked = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False, repetition_penalty=1.2, pad_token_id=0)
    for prompt, answer in zip(prompts, got):
        assert list(answer.tokens) == theirs.generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist()


class Ids:
    """A tokenizer whose text is the numbers."""

    def decode(self, ids, skip_special=False):
        return " ".join(map(str, ids))


def test_a_prompt_that_is_too_long_prints_nothing(folder):
    out = io.StringIO()
    with pytest.raises(ValueError, match="the model's context is 64. Shorten it to 63 or fewer"):
        generate.stream(folder, "a " * 10_000, Sampling(tokens=2), out)
    assert out.getvalue() == ""
