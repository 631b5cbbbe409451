"""`meshloom plan`: from a model and a cluster to the best layout, told, drawn and saved."""

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshloom.core.config import nearest, to_tree
from meshloom.core.files import check_ours
from meshloom.models import known
from meshloom.models.base import Model
from meshloom.parallel.table import devices, parse, spell
from meshloom.plan import bars
from meshloom.plan.hardware import Cluster, present, read
from meshloom.plan.memory import stored
from meshloom.plan.page import check as check_file
from meshloom.plan.search import Candidate, Question, search
from meshloom.plan.space import Allowed
from meshloom.plan.told import Budget, lines, tree
from meshloom.plan.unfit import unfit
from meshloom.recipes import load, saved
from meshloom.recipes.auto import question_of
from meshloom.recipes.launch import DTYPES
from meshloom.recipes.run import RunConfig
from meshloom.train.config import OptimizerConfig
from meshloom.train.optimizer import make_optimizer, state_specs
from meshloom.weights import hf

BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
"""Suffixes of a batch, a power of two; of a budget of tokens, a power of ten."""
MOST = {"--batch-tokens": 2**30, "--tokens": 10**15}
"""Tokens at most, by flag: beyond this a number is a slip."""
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")
BATCH, SEQ = "4M", 8192
"""Tokens of a step, and of a sequence where the model takes as many, for models that are not a recipe."""


class Wish(NamedTuple):
    """What a person asks for. model: a known model, a recipe, or a Hugging Face folder. on: a cluster, None for the devices present. batch: as text.
    precision, remat, micro, layout: fixed where given (layout: some of its words). exact: whether the best has to be proven, however long that takes."""

    model: str
    on: str | None = None
    batch: str | None = None
    seq: int | None = None
    precision: str | None = None
    remat: str | None = None
    micro: int | None = None
    layout: str = ""
    sets: tuple[str, ...] = ()
    exact: bool = False


class Asked(NamedTuple):
    """A wish, read. title: of the model. tree: family and fields. optimizer: what the bytes beside the parameters are. config: of a recipe, or None."""

    title: str
    tree: dict[str, Any]
    precision: str
    question: Question
    config: RunConfig | None = None


def amount(text: str, flag: str, units: Mapping[str, int]) -> int:
    """A whole number with a suffix: 4M.  flag: that it was given by.  Raises ValueError for other text, another suffix, and parts of a token."""
    found = AMOUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    listed = ", ".join(f"{unit} ({n:,})" for unit, n in units.items() if unit)
    if not found or found[2].upper() not in units:
        raise ValueError(f"{flag} {text} is no number of tokens. Write a number with one of these behind it, or none: {listed}.")
    n = float(found[1]) * units[found[2].upper()]
    if n > MOST.get(flag, math.inf):
        raise ValueError(f"{flag} {text} is {n:.3g} tokens, more than any run takes. Give {MOST[flag]:,} at most.")
    if n < 1 or n != int(n):
        raise ValueError(f"{flag} {text} is {n:g} tokens, and it takes a whole number of at least 1. The suffixes are: {listed}.")
    return int(n)


def ask(w: Wish) -> Asked:
    """What a wish asks the planner.  Raises ValueError and OSError, each with a sentence, for what is unknown or cannot be."""
    cluster = read(w.on) if w.on else present()
    allowed = Allowed(words=_words(w.layout, cluster), micro=w.micro, **({"remats": (w.remat,)} if w.remat else {}))
    if w.micro is not None and w.micro < 1:
        raise ValueError(f"--micro {w.micro} is no number of micro-batches. Give 1 or more.")
    if config := _recipe(w):
        return _of_recipe(w, config, cluster, allowed)
    if w.sets:
        raise ValueError(f"--set {w.sets[0]} changes a recipe, and '{w.model}' is a model. Plan a recipe, or leave --set out.")
    model, c = _model(w.model)
    seq = w.seq if w.seq is not None else min(SEQ, c.max_seq)
    _check_seq(seq, c, w.model)
    sequences = _sequences(amount(w.batch or BATCH, "--batch-tokens", BINARY), seq, w.batch or BATCH)
    precision = w.precision or "bf16"
    specs = model.specs(c)
    state = state_specs(make_optimizer(OptimizerConfig(), specs), specs)
    question = Question(model, c, cluster, seq, sequences, DTYPES[precision], False, lambda lay: {"optimizer": stored(lay, state)}, allowed)
    return Asked(w.model, {"family": model.name, **to_tree(c)}, precision, question)


def _words(words: str, cluster: Cluster) -> str:
    """The words of a layout that are fixed, read once so that a mistake is told; `sequence` and others that stand beside one bring nothing of their own."""
    asked = parse(words)
    need = devices(words)
    if cluster.devices % need:
        raise ValueError(
            f"--layout {words} takes {need} devices, which do not divide the {cluster.devices} of {cluster.label}. Use other numbers."
        )
    return "" if not asked else spell(asked)


def _recipe(w: Wish) -> RunConfig | None:
    """The recipe that a wish names; None for a known model or a Hugging Face folder."""
    folder = Path(w.model).expanduser()
    if w.model in known.names() or ((folder / "config.json").is_file() and not (folder / load.RESOLVED).is_file()):
        return None
    try:
        return load.load_recipe(w.model, w.sets)
    except FileNotFoundError as error:
        if "/" in w.model or w.model.endswith((".yaml", ".yml")):
            raise
        near = nearest(w.model, [*known.names(), *load.names()])
        guess = f" Did you mean '{near}'?" if near else ""
        raise ValueError(
            f"'{w.model}' is neither a known model nor a recipe.{guess} Known models: {', '.join(known.names())}. "
            f"Recipes: {', '.join(load.names())}, or a YAML file, or a Hugging Face folder."
        ) from error


def _model(name: str) -> tuple[Model, Any]:
    """A known model, or that of a Hugging Face folder."""
    if name in known.names():
        return known.known(name)
    source = hf.open_folder(Path(name).expanduser())
    return source.model, source.config


def _of_recipe(w: Wish, config: RunConfig, cluster: Cluster, allowed: Allowed) -> Asked:
    """What a recipe asks for, under the flags that were given."""
    config = _with(config, w)
    return Asked(config.name, saved.model_tree(config), config.train.precision, question_of(config, cluster, allowed), config)


def _with(config: RunConfig, w: Wish) -> RunConfig:
    """A recipe under the flags of a wish."""
    seq = w.seq if w.seq is not None else config.data.seq
    sequences = _sequences(amount(w.batch, "--batch-tokens", BINARY), seq, w.batch) if w.batch else config.batch.sequences
    batch = config.batch.model_copy(update={"sequences": sequences})
    train = config.train.model_copy(update={"precision": w.precision or config.train.precision})
    return config.model_copy(update={"data": config.data.model_copy(update={"seq": seq}), "batch": batch, "train": train})


def _check_seq(seq: int, c: Any, name: str) -> None:
    """Refuses sequences that a model does not take."""
    if not 1 <= seq <= c.max_seq:
        raise ValueError(f"--seq {seq} is not a length that {name} takes: it is made for 1 to {c.max_seq} tokens. Give one of these.")


def _sequences(tokens: int, seq: int, text: str) -> int:
    """Sequences of a step.  Raises ValueError where they are not whole."""
    if tokens % seq:
        down = tokens // seq * seq
        near = f"{down:,} or {down + seq:,}" if down else f"{seq:,}"
        raise ValueError(
            f"--batch-tokens {text} is {tokens:,} tokens, which are not a whole number of sequences of {seq:,}. Give {near}, or another --seq."
        )
    return tokens // seq


class Wanted(NamedTuple):
    """What is to be done with a plan. tokens, price: of a budget. json: one JSON object in place of text. picture, save: files. compile: by the real
    compiler too."""

    tokens: str | None = None
    price: float | None = None
    json: bool = False
    picture: Path | None = None
    save: Path | None = None
    compile: bool = False


def plan(w: Wish, want: Wanted = Wanted()) -> bool:
    """Plans, tells, draws and saves.  Returns whether anything fits.  Raises ValueError where no layout admits what was asked, at any memory."""
    if want.picture:
        check_file(want.picture)
    budget = Budget(amount(want.tokens, "--tokens", DECIMAL) if want.tokens else None, want.price)
    if want.price is not None and not 0 <= want.price < math.inf:
        raise ValueError(f"--price {want.price} is no price. Give dollars a device-hour, such as 2.5.")
    if want.price is not None and not want.tokens:
        raise ValueError(f"--price {want.price:g} has no run to price. Say how long it is too, such as --tokens 15T.")
    if want.save:
        check_ours(want.save, saved.HEAD, "plan")
    asked = ask(w)
    asked = asked._replace(question=asked.question._replace(exact=w.exact))
    q = asked.question
    found = search(q)
    batch = f"--batch-tokens {w.batch or BATCH} = {q.sequences * q.seq:,}" if w.batch or not asked.config else ""
    if want.json:
        print(json.dumps(tree(asked.title, q, found, budget), indent=1))
    else:
        print("\n".join(lines(asked.title, q, found, budget, batch)))
    if found.best is None:
        told = "\n".join(unfit(q, found))
        if found.least is None:  # not a matter of memory, but a mistake in what was asked
            raise ValueError(told)
        print(told, file=sys.stderr if want.json else sys.stdout)
        return False
    if want.picture:
        bars.draw(asked.title, q, found, want.picture)
        _say(want, f"Written: {want.picture}")
    if want.save:
        saved.save(file_of(asked, found.best), want.save)
        _say(want, f"Saved: {want.save}; meshloom train RECIPE --plan {want.save} takes it")
    if want.compile:
        from meshloom.recipes.compiled import compare

        for line in compare(asked, found.best):
            _say(want, line)
    return True


def _say(want: Wanted, line: str) -> None:
    """A line for people: not among JSON."""
    print(line, file=sys.stderr if want.json else sys.stdout)


def file_of(asked: Asked, one: Candidate) -> saved.Saved:
    """A candidate as a file keeps it."""
    q = asked.question
    return saved.Saved(
        model=asked.tree,
        hardware=q.cluster.label,
        devices=q.cluster.devices,
        seq=q.seq,
        sequences=q.sequences,
        precision=asked.precision,
        layout=one.spelling,
        micro_batches=one.micro,
        remat=one.how.remat,
        runner=one.how.runner,
        predicted={"seconds": one.time.total, "bytes": float(one.memory.total)},
    )
