"""From a recipe to a run: everything that the recipe leaves open is decided here, once, and said."""

import math
import platform
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshloom import __version__
from meshloom.core.config import dump, to_tree
from meshloom.core.files import FolderLock, write_text
from meshloom.core.layout import PIPE, Layout
from meshloom.core.mesh import make_mesh
from meshloom.core.order import padding
from meshloom.core.remat import automatic, limit_of, one, words_of
from meshloom.core.tree import Tree
from meshloom.data import tokenizer as tokenizers
from meshloom.data.sets import Sets, describe, open_sets
from meshloom.models.attention import training_row
from meshloom.models.base import Model
from meshloom.models.freeze import frozen, frozen_paths
from meshloom.models.table import MODELS
from meshloom.objectives.lm import lm
from meshloom.parallel.pipe import chunks_in, own, skips, table_of
from meshloom.parallel.table import build, parse, spell
from meshloom.plan.cost import shapes
from meshloom.plan.explain import Explained, Kept, brief, explain, fits, lines
from meshloom.plan.hardware import at_hand
from meshloom.plan.memory import stored
from meshloom.plan.plan import Plan
from meshloom.recipes import foretold
from meshloom.recipes.load import RESOLVED
from meshloom.recipes.run import Folder, RunConfig
from meshloom.runner.run import UNOFFERED, How
from meshloom.runner.stage import placed
from meshloom.serve.generate import sampler
from meshloom.serve.sampling import Sampling
from meshloom.train import loop
from meshloom.train.loop import Outcome, Run
from meshloom.train.method import Method, facts_of, plain, shape
from meshloom.train.method import check as check_method
from meshloom.train.optimizer import make_optimizer
from meshloom.train.step import state_of
from meshloom.weights import hf
from meshloom.weights.load import Source, check, load

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
UNROLL_UP_TO = 32
"""Layers that `runner: auto` unrolls on a CPU; deeper models compile too long."""

SPARE = 0.05
"""Part of a device's memory that `remat: auto` leaves free, for what no formula knows: fragments, a compiler's own buffers."""
NOTHING_SAVED = "remat: a CPU's compiler merges what unrolled layers compute again with the first computation, so this saves nothing here; train.runner: scan does."


class Chosen(NamedTuple):
    """A recipe's model and plan, with nothing left open and nothing allocated.  said: sentences about what was decided."""

    model: Model
    config: Any
    source: Source | None
    spelling: str
    plan: Plan
    said: tuple[str, ...]


def choose(config: RunConfig, devices: list | None = None) -> Chosen:
    """The model, layout and plan of a recipe on these devices (by default all).  Raises ValueError where they do not fit each other."""
    devices = jax.devices() if devices is None else devices
    model, c, source = model_of(config)
    check_length(config, c)
    said = [f"{source.name}: {check(source)}"] if source else []
    spelling, micro = config.layout, None
    if spelling == "auto":
        from meshloom.recipes.auto import automatic_layout

        spelling, micro, why = automatic_layout(config, len(devices), devices[0].platform)
        said.append(why)
    layout = build(spelling, c, config.data.seq, devices[0].platform)
    mesh, micro = make_mesh(layout, devices), micro or micro_batches(config, layout)
    _check_batch(config.batch.sequences, micro, layout.size(layout.batch))
    check_method(method(config), layout, model.specs(c))
    packed = config.data.packing == "documents"
    plan = Plan(mesh, layout, How(), micro, DTYPES[config.train.precision], packed)
    remat, why = remats(config, model, c, spelling, plan)
    plan = plan._replace(how=How(runner(config, c, layout.platform, remat), remat))
    said += why + [NOTHING_SAVED] * (layout.platform == "cpu" and plan.how.runner == "unroll" and remat != "none")
    rows = config.batch.sequences // (plan.micro * layout.size(layout.batch))
    kinds = dict.fromkeys(model.kinds(c))
    said += dict.fromkeys(training_row(c, layout, kind, rows, config.data.seq, packed, plan.dtype) for kind in kinds)
    said += [line] if (line := padding(layout, config.data.seq)) else []
    if where := placed(model, c, layout):
        chosen = f"pipeline: {micro} micro-batch{'es' * (micro > 1)} (chosen; batch.micro_batches says how many)"
        said += [chosen] * (config.batch.micro_batches == "auto") + [where.said(skips(layout))] * bool(where.masked)
    return Chosen(model, c, source, spell(parse(spelling)), plan, tuple(said))


def model_of(config: RunConfig) -> tuple[Model, Any, Source | None]:
    """The family, with what is frozen, and the sizes that a recipe asks for, and where its weights come from (None: random)."""
    if isinstance(config.model, Folder):
        source = hf.open_folder(Path(config.model.path).expanduser())
        return frozen(source.model, source.config, config.train.freeze), source.config, source
    c = config.model.config
    return frozen(MODELS[config.model.family], c, config.train.freeze), c, None


def check_length(config: RunConfig, c: Any) -> None:
    """Refuses sequences longer than the model is made for."""
    if config.data.seq > c.max_seq:
        raise ValueError(
            f"data.seq is {config.data.seq} tokens and the model is made for max_seq {c.max_seq}. Lower data.seq, or raise model.max_seq."
        )


def remats(config: RunConfig, model: Model, c: Any, spelling: str, plan: Plan) -> tuple[str, list[str]]:
    """What the layers keep, and what was decided about it: as the recipe says, or the best pattern under the memory of a device.
    plan: with anything for `how`.  Raises ValueError where no pattern fits, and for one that these layers or devices have no form for."""
    remat, lay = config.train.remat, plan.layout
    if not automatic(remat):
        where = placed(model, c, lay)
        words = words_of(remat, len(where.kinds) if where else c.layers, "slots in a part of the pipeline" if where else "layers")
        if "offload" in words and lay.platform in UNOFFERED:
            raise ValueError(f"remat 'offload' moves nothing on '{lay.platform}': {UNOFFERED[lay.platform]}. Use 'selective', or 'full'.")
        return remat, []
    from meshloom.plan.hardware import present
    from meshloom.plan.remat import choose as best

    cluster, limit, specs = present(), limit_of(remat), model.specs(c)
    beside = shape(method(config), plan, specs)
    trees = [*beside.kinds.values(), *([beside.state.ema] if config.train.ema else [])]
    held = stored(lay, specs) + sum(stored(beside.layout, tree) for tree in trees)
    x = shapes(model, c, lay, config.data.seq, config.batch.sequences, plan.micro, How("scan"), plan.dtype, plan.packed)
    limit = int(cluster.hardware.memory * (1 - SPARE)) if limit is None else limit
    found = best(model, x, "" if spelling == "one device" else spelling, cluster, limit, held)
    return found.remat, [found.said]


def runner(config: RunConfig, c: Any, platform: str, remat: str) -> str:
    """How the layers run: as the recipe says, or what is best on a platform.  remat: what they keep."""
    if config.train.runner != "auto":
        return config.train.runner
    # a CPU's compiler merges an unrolled layer's recomputation with the first computation, so that remat would save nothing
    return "unroll" if platform == "cpu" and c.layers <= UNROLL_UP_TO and one(remat) == "none" else "scan"


def micro_batches(config: RunConfig, layout: Layout) -> int:
    """Micro-batches of a step: as the recipe says; else 1, or in a pipeline the most up to 4 a stage that its schedule and the batch admit.
    Raises ValueError where there are none, or those of the recipe do not fit."""
    given, shards = config.batch.micro_batches, layout.size(layout.batch)
    if given != "auto":
        table_of(layout, given)  # refuses, with the nearest that fit
        return given
    if layout.stages == 1:
        return 1
    if table := own(layout.options.get(PIPE, ())):
        return table.micro
    group, rows = layout.stages if chunks_in(layout) > 1 else 1, config.batch.sequences
    fit = [n for n in range(group, 4 * layout.stages + 1, group) if rows % (n * shards) == 0]
    if not fit:
        need = group * shards
        raise ValueError(
            f"A batch of {rows} sequences cannot be cut into micro-batches for this pipeline: it takes {group} or a multiple of it, over {shards} devices "
            f"each. Use batch.sequences that is a multiple of {need}, such as {-(-rows // need) * need}."
        )
    return fit[-1]


def _check_batch(sequences: int, micro: int, shards: int) -> None:
    """Refuses a micro-batch whose sequences do not divide over the batch's devices."""
    rows = sequences // micro
    if rows % shards:
        near = max(shards * micro, round(sequences / (shards * micro)) * shards * micro)
        raise ValueError(
            f"{sequences} sequences in {micro} micro-batches are {rows} each, which {shards} devices cannot share "
            f"evenly. Use batch.sequences: {near}, or other batch.micro_batches."
        )


def describe_plan(config: RunConfig, chosen: Chosen) -> list[str]:
    """The plan as lines for people, in full; allocates nothing."""
    there, plan = at_hand(), explained(config, chosen)
    known = [fits(plan, there.hardware.memory, there.label), foretold.line(config, chosen, there)] if there else []
    return [*chosen.said, *lines(plan), *known]


def method(config: RunConfig) -> Method:
    """The way of training that a recipe asks for; its number of steps where the recipe says it."""
    return Method(config.optimizer, config.outer, config.train, config.train.steps or 0)


def explained(config: RunConfig, chosen: Chosen) -> Explained:
    """The plan in numbers."""
    found = shape(method(config), chosen.plan, chosen.model.specs(chosen.config))
    beside = Kept({**found.kinds, **({"average": found.state.ema} if config.train.ema else {})}, found.layout, found.moves)
    return explain(chosen.model, chosen.config, chosen.spelling, chosen.plan, config.data.seq, config.batch.sequences, beside)


def kept(config: RunConfig, params: Tree) -> dict[str, Tree]:
    """The specs of what a run stores between steps beside its parameters; for a way of training that saves traffic, those of the plain one."""
    state = state_of(make_optimizer(plain(config.optimizer), params), params, config.train)
    return {"optimizer": state.opt, **({"average": state.ema} if config.train.ema else {})}


class Prepared(NamedTuple):
    """A recipe's tokenizer and data."""

    tokenizer: tokenizers.Tokenizer
    sets: Sets
    steps: int


def prepare(config: RunConfig, vocab: int, progress: bool = True) -> Prepared:
    """The data of a recipe, tokenized where it is not yet, and the number of steps.  vocab: the model's; refused if smaller than the tokenizer's."""
    tokenizer = tokenizers.load(config.tokenizer.path, config.tokenizer)
    tokenizers.check_vocabulary(tokenizer.size, vocab)
    sets = open_sets(config.data, tokenizer, config.seed, progress)
    return Prepared(tokenizer, sets, steps_of(config, sets.train.rows))


def steps_of(config: RunConfig, rows: int) -> int:
    """Optimizer steps of a run: as given, or tokens or epochs rounded up to whole steps.  rows: samples of an epoch."""
    per_step = config.batch.sequences
    if config.train.steps is not None:
        return config.train.steps
    if config.train.tokens is not None:
        return math.ceil(config.train.tokens / (per_step * config.data.seq))
    assert config.train.epochs is not None  # TrainConfig: exactly one of the three
    return math.ceil(config.train.epochs * rows / per_step)


def facts(config: RunConfig, chosen: Chosen) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {
        "model": {"family": chosen.model.name, **to_tree(chosen.config)},
        "layout": chosen.spelling,
        "training": facts_of(method(config), chosen.plan.layout),
        "frozen": frozen_paths(chosen.model.specs(chosen.config)),
        "recipe": to_tree(config),
        "versions": {"meshloom": __version__, "jax": jax.__version__, "python": platform.python_version()},
        **({"huggingface": _said(chosen.source)} if chosen.source else {}),
    }


def weights(source: Source | None) -> Callable[[Tree], Tree] | None:
    """shardings -> the weights of a checkpoint; None for random ones."""
    return None if source is None else lambda where: load(source, where).weights


def train(config: RunConfig, folder: Path, resume: bool = False) -> Outcome:
    """Runs a recipe in a folder: plan, data, training, export.  resume: go on from the folder's newest checkpoint.

    Raises FileExistsError where the folder holds another run and resume was not asked for.
    """
    chosen = choose(config)
    first = jax.process_index() == 0
    say = print if first else (lambda text: None)
    if not resume and (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir()):
        raise FileExistsError(f"{folder} holds a run already. Go on with it by --resume, or give another folder by --out.")
    with FolderLock(folder) if first else nullcontext() as lock:
        if lock and lock.said:
            say(lock.said)
        ready = _in_turn(lambda: prepare(config, chosen.config.vocab))
        told = (*chosen.said, *brief(explained(config, chosen)), *ready.sets.report)
        for line in (*told, *describe(ready.sets.train, ready.sets.valid, ready.steps * config.batch.sequences)):
            say(line)

        def begun() -> None:
            if first:
                write_text(folder / RESOLVED, dump(config))
                ready.tokenizer.save(folder / "tokenizer")

        outcome = loop.train(_run(config, folder, chosen, ready)._replace(begun=begun), resume)
        if outcome.signal is not None:
            kept = f"The checkpoint of step {outcome.step} is saved" if outcome.step else "No step was done, so nothing is saved"
            say(f"Stopped by {signal.Signals(outcome.signal).name}. {kept}; --resume --out {folder} goes on from there.")
        else:
            if line := _export(folder, chosen, outcome):
                say(line)
            say(f"The run lies in {folder}: {', '.join(sorted(p.name for p in folder.iterdir() if not p.name.startswith('.')))}.")
        return outcome


def _export(folder: Path, chosen: Chosen, outcome: Outcome) -> str:
    """Writes the model as a Hugging Face folder; where its family has no counterpart there, returns a sentence that says so, else ""."""
    if not chosen.model.hf(chosen.config):
        return (
            f"No hf folder is written: Hugging Face has no counterpart of this {chosen.model.name} model. Its weights are in checkpoints/."
        )
    said, words = _said(chosen.source), folder / "tokenizer"
    hf.save(folder / "hf", chosen.model, chosen.config, outcome.state.params, tokenizer=words, overwrite=True, **said)
    return ""


def _in_turn(work: Callable[[], Prepared]) -> Prepared:
    """Work that fills a shared cache: the first process does it, the others then find it done."""
    if jax.process_count() == 1:
        return work()
    from jax.experimental.multihost_utils import sync_global_devices

    done = work() if jax.process_index() == 0 else None
    sync_global_devices("meshloom prepare")
    return done or work()


def _said(source: Source | None) -> dict[str, Any]:
    """What an export keeps of the model that the run started from."""
    return {} if source is None else {"said": source.said, "generation": source.generation}


def writer(chosen: Chosen, tokenizer: tokenizers.Tokenizer, config: RunConfig) -> Callable[[Tree], list[str]]:
    """Parameters in training -> what the model writes behind each of the recipe's prompts."""
    s = config.sample
    sampling = Sampling(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, tokens=s.tokens, seed=config.seed)
    plan = chosen.plan
    return sampler(chosen.model, chosen.config, plan.mesh, plan.layout, tokenizer, s.prompts, sampling, plan.dtype)


def _run(config: RunConfig, folder: Path, chosen: Chosen, ready: Prepared) -> Run:
    """The resolved run."""
    write = writer(chosen, ready.tokenizer, config) if config.sample.prompts else None
    return Run(
        folder=folder,
        seed=config.seed,
        model=chosen.model,
        config=chosen.config,
        plan=chosen.plan,
        objective=lm(config.train.z_loss),
        data=ready.sets.train,
        valid=ready.sets.valid,
        steps=ready.steps,
        batch=config.batch,
        optimizer=config.optimizer,
        outer=config.outer,
        schedule=config.schedule,
        train=config.train,
        checkpoint=config.checkpoint,
        eval=config.eval,
        sample=config.sample,
        log=config.log,
        facts=facts(config, chosen),
        weights=weights(chosen.source),
        write=write,
    )
