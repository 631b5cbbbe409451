"""Text from a model on disk or in training: what `meshloom generate` and the training loop's samples call."""

import json as jsonlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
from jax.sharding import Mesh

from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.tree import Tree
from meshloom.data import tokenizer as tokenizers
from meshloom.models.base import Model
from meshloom.parallel.table import build
from meshloom.serve.answer import Answer, answers
from meshloom.serve.engine import Engine, make_engine
from meshloom.serve.sampling import Sampling
from meshloom.weights.opened import Opened, open_model

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""--precision -> type of the arithmetic."""


class Speaker(NamedTuple):
    """A model that is ready to write: its programs, its weights on the devices, its tokenizer."""

    engine: Engine
    weights: Tree
    tokenizer: Any
    ends: tuple[int, ...]

    def write(self, prompts: Sequence[str], sampling: Sampling, every: int = 0) -> Iterator[list[Answer]]:
        """The answers to some prompts.  every: as for `answers`: new tokens between two yields, 0 for one yield at the end."""
        ids = [encode(self.tokenizer, prompt) for prompt in prompts]
        return answers(self.engine, self.weights, self.tokenizer, ids, requests(sampling, len(prompts)), self.ends, every)


def requests(sampling: Sampling, count: int) -> list[Sampling]:
    """One request a prompt: the i-th has seed + i."""
    return [sampling.model_copy(update={"seed": (sampling.seed + i) % 2**32}) for i in range(count)]


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt's ids, with a start token where the tokenizer's section or its own rules ask for one; an empty prompt is a start or end token."""
    ids, bos = tokenizer.encode(prompt), tokenizer.bos
    asked = tokenizer.config.bos or tokenizer.backend.encode("", add_special_tokens=True).ids[:1] == [bos]
    if bos is not None and asked and ids[:1] != [bos]:
        ids = [bos, *ids]
    return ids or [tokenizer.end if bos is None else bos]


def tokenizer_of(found: Opened) -> tokenizers.Tokenizer:
    """The tokenizer that lies with a model, with the start and end tokens of the run's recipe; control tokens in a prompt are read as such.
    Raises ValueError where there is none, or one with more ids than the model has."""
    given = {**found.info.get("recipe", {}).get("tokenizer", {}), "path": found.name, "control_text": "control"}
    section = tokenizers.TokenizerSection(**given)
    tokenizer = tokenizers.beside(found.tokenizer, section, found.name)
    tokenizers.check_vocabulary(tokenizer.size, found.config.vocab, tokenizer.name)
    return tokenizer


def end_tokens(tokenizer: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end a text: all of generation_config.json's (in `generation`, config.json's stand where it has none), else the tokenizer's."""
    given = generation.get("eos_token_id")
    if given is None:
        return tuple(dict.fromkeys((tokenizer.end, *tokenizer.eos)))
    return tuple(given) if isinstance(given, list) else (given,)


def speaker(path: str | Path, *, step: int | None = None, layout: str = "auto", precision: str = "fp32", gather: str = "layer") -> Speaker:
    """A model read from disk: a run's folder, one checkpoint, a Hugging Face folder, a GGUF file.  step: which checkpoint of a run.
    layout: the compact spelling; `auto` is one device.  precision: a key of DTYPES.  gather: as for `make_engine`."""
    found = open_model(path, step)
    model, c, tokenizer = found.model, found.config, tokenizer_of(found)
    lay = build("" if layout == "auto" else layout, c, c.max_seq, jax.devices()[0].platform)
    mesh = make_mesh(lay) if lay.devices > 1 else None
    engine = make_engine(model, c, mesh, lay, DTYPES[precision], gather)
    params = found.weights(None if mesh is None else shardings(mesh, lay, "rest", model.specs(c)))
    return Speaker(engine, engine.prepare(params), tokenizer, end_tokens(tokenizer, found.generation))


def generate_text(path: str | Path, prompts: Sequence[str], sampling: Sampling, **how: Any) -> list[Answer]:
    """The whole answers of a model on disk.  how: as for `speaker`."""
    (found,) = speaker(path, **how).write(prompts, sampling)
    return found


def show(prompts: Sequence[str], found: Sequence[Answer], json: bool = False, out: TextIO | None = None) -> None:
    """Prints answers: prompt and text, blank lines between; or one JSON object a prompt."""
    out = out or sys.stdout
    if not json:
        print("\n\n".join(prompt + answer.text for prompt, answer in zip(prompts, found)), file=out)
        return
    for prompt, answer in zip(prompts, found):
        print(jsonlib.dumps({"prompt": prompt, **answer._asdict()}, ensure_ascii=False), file=out)


def stream(path: str | Path, prompt: str, sampling: Sampling, out: TextIO | None = None, every: int = 4, **how: Any) -> Answer:
    """Prints a prompt and its answer as it is made.  every: new tokens between two prints.  how: as for `speaker`.  Returns the answer."""
    out, shown = out or sys.stdout, ""
    ready = speaker(path, **how)
    for (answer,) in ready.write([prompt], sampling, every):  # what is refused is refused before the first
        text = prompt + answer.text
        print(text[len(shown) :], end="", file=out, flush=True)
        shown = text
    print(file=out)
    return answer


def sampler(
    model: Model,
    c: Any,
    mesh: Mesh | None,
    layout: Layout,
    tokenizer: Any,
    prompts: Sequence[str],
    sampling: Sampling,
    dtype: str = "float32",
) -> Callable[[Tree], list[str]]:
    """A function from parameters (in training, in the `rest` table) to the text behind each prompt; compiled once, for all the samples of a run.
    Asks for fewer new tokens where the model's context leaves no room, and keeps the end of a prompt that is longer than half of it."""
    engine = make_engine(model, c, mesh if layout.devices > 1 else None, layout, dtype)
    ids = [encode(tokenizer, prompt)[-max(1, c.max_seq // 2) :] for prompt in prompts]
    room = c.max_seq - max(map(len, ids), default=0)
    fits = sampling.model_copy(update={"tokens": min(sampling.tokens, room)})

    def sample(params: Tree) -> list[str]:
        if not ids:
            return []
        (found,) = answers(engine, engine.prepare(params), tokenizer, ids, requests(fits, len(ids)), end_tokens(tokenizer, {}))
        return [answer.text for answer in found]

    return sample
