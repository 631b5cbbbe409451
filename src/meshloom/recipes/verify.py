"""`meshloom verify`: a recipe's own model, shrunken, trained for a few steps on one device and under every layout, and all of it compared."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from meshloom.core.batch import Batch
from meshloom.core.layout import PIPE, Layout
from meshloom.core.mesh import make_mesh
from meshloom.core.order import arranged
from meshloom.core.remat import automatic, resized
from meshloom.core.spec import Spec, init, is_spec
from meshloom.core.tree import Tree, map_named, named_leaves
from meshloom.models.base import Model
from meshloom.objectives.lm import lm
from meshloom.parallel.pipe import chunks_in, layers_of, own
from meshloom.parallel.table import build, parse
from meshloom.plan.cost import compare, shapes, step_cost
from meshloom.plan.hlo import collectives
from meshloom.plan.memory import counted, device_memory, stored
from meshloom.plan.plan import Plan
from meshloom.plan.stages import pipeline
from meshloom.plan.verify import SEQ, Row, Stored, default_layouts, refused, shrink, tables
from meshloom.recipes.auto import automatic_layout
from meshloom.recipes.launch import model_of
from meshloom.recipes.run import RunConfig
from meshloom.runner.run import How
from meshloom.runner.stage import placed
from meshloom.train.config import ScheduleConfig
from meshloom.train.gradient import make_gradient
from meshloom.train.method import plain
from meshloom.train.optimizer import OPTIMIZERS
from meshloom.train.schedule import make_schedule
from meshloom.train.step import State, Step, make_step

WIDE = 130
"""Columns of the tables where no terminal says how many it has."""
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options that make XLA's CPU compiler faster and change no collective: only what comes after them."""
EXACT = ("adamw", "lion", "sgd")
"""Optimizers that work element by element and so move nothing. The others' traffic is the compiler's choice and has no formula: for these, the
collectives are those of the program up to the gradient."""

COUPLED = ("adafactor",)
"""Optimizers that scale a whole tensor by its update's size. Where some of its elements have no gradient but rounding errors (key biases), these
reach all others, and last weights say nothing; loss and norm of every step are compared all the same."""


class Case(NamedTuple):
    """What is run: the shrunken model, the recipe, and how the batch is cut."""

    model: Model
    full: Any
    """The recipe's own configuration of the model: it decides which layouts are admitted."""
    small: Any
    config: RunConfig
    how: How
    micro: int
    sequences: int


class Outcome(NamedTuple):
    """What one layout computed, on the host. losses, norms: of every step. gradient: of the first. needs: bytes of a device, by the
    compiler."""

    start: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]
    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]
    replicas: bool
    stored: tuple[Stored, ...]
    found: list
    needs: int = 0


BOTH_ENDS = "full 1, none 1"
"""The pattern that stands for `auto`, which is solved at the recipe's own size."""


def verify(config: RunConfig, layouts: tuple[str, ...] = (), steps: int = 5) -> bool:
    """Whether every layout agrees with one device and with its formulas. Prints the tables. Refused layouts are shown and do not count."""
    if steps < 1:
        raise ValueError(f"--steps is {steps}; at least 1 step is needed to compare.")
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDE)
    chosen = case(config)
    console.print(about(chosen))
    rows = []
    with console.status("") as status:
        for row in check(chosen, layouts or _layouts(config, chosen.full), steps, lambda spelling: status.update(f"{spelling} ...")):
            rows.append(row)
    for table in tables(rows, steps):
        console.print(table)
    for row in rows:
        if row.refused:
            console.print(f"{row.spelling} is refused: {row.refused}", soft_wrap=True, highlight=False)
    wrong = [f"{row.spelling}: {said}" for row in rows for said in row.wrong]
    for line in wrong:
        console.print(line, style="red", soft_wrap=True, highlight=False)
    if rows and all(row.refused for row in rows):
        raise ValueError("Not one layout could be compared: all that were asked for are refused. Ask for others by --layouts.")
    return not wrong


def _layouts(config: RunConfig, c: Any) -> tuple[str, ...]:
    """What is checked where nobody asks for layouts: a standard set, and what the planner chooses for a recipe that leaves the layout to it."""
    if config.layout != "auto":
        return default_layouts(c)
    devices = jax.devices()
    chosen = automatic_layout(config, len(devices), devices[0].platform).spelling
    return tuple(dict.fromkeys((*default_layouts(c), *filter(None, (chosen,)))))


def case(config: RunConfig) -> Case:
    """The shrunken model of a recipe and how it is run: fp32, and the scanned loop (it compiles fastest) unless the recipe names one.
    What saves traffic between replicas is left out: layouts are compared by steps that are equal under all of them."""
    model, full, _ = model_of(config)
    runner = "scan" if config.train.runner == "auto" else config.train.runner
    micro = 1 if config.batch.micro_batches == "auto" else min(config.batch.micro_batches, 2)
    config = config.model_copy(update={"optimizer": plain(config.optimizer)})
    remat = BOTH_ENDS if automatic(config.train.remat) else config.train.remat
    return Case(model, full, shrink(model, full), config, How(runner, remat), micro, 8 * micro)


def about(x: Case) -> str:
    """One sentence on what is run."""
    c = x.small
    return (
        f"{x.model.name}: {c.layers} layers, embed {c.embed}, {c.heads} heads ({c.kv_heads} for keys), ffn {c.ffn}, vocabulary {c.vocab}; "
        f"{x.sequences} rows of {SEQ} tokens in {x.micro} micro-batch{'es' * (x.micro > 1)}, {x.how.runner}, remat {x.how.remat}, {x.config.optimizer.kind}, fp32"
    )


def check(x: Case, layouts: tuple[str, ...], steps: int, say: Any = lambda spelling: None) -> Iterator[Row]:
    """The row of each layout, one after another.  Raises ValueError where a layout is not one, or needs more devices than there are."""
    say("one device")
    x, ones = big_enough(x, layouts), {}
    for spelling in layouts:
        say(spelling)
        parse(spelling)
        try:
            build(spelling, x.full, x.config.data.seq)
        except ValueError as why:
            yield refused(spelling, str(why))
            continue
        here = as_stated(x, spelling)
        try:
            layout = build(spelling, here.small, SEQ)
        except ValueError as why:
            yield refused(spelling, f"The model admits it, its shrunken copy does not: {why}")
            continue
        own = cut_for(here, layout)
        key = own.micro, own.small.layers  # what experts' losses see of a batch is a micro-batch
        if key not in ones:
            ones[key] = run(own, "", steps)
        got = run(own, spelling, steps)
        how = how_in(own, layout)
        sizes = shapes(x.model, own.small, layout, SEQ, own.sequences, own.micro, how, "float32", _packed(x))
        found = row(spelling, got, ones[key], compare(got.found, step_cost(spelling, sizes)), x.config.optimizer.kind not in COUPLED)
        pipe, kept = pipeline(x.model, sizes), {s.kind: s.formula for s in got.stored}
        yield found._replace(memory=(got.needs, device_memory(x.model, sizes, kept, pipe and pipe.flight).total))


def as_stated(x: Case, spelling: str) -> Case:
    """The case with all of the model's layers where a layout says how many each stage has."""
    pipe = parse(spelling).get(PIPE)
    return x._replace(small=shrink(x.model, x.full, x.full.layers)) if pipe and layers_of(pipe.options) else x


def big_enough(x: Case, layouts: tuple[str, ...]) -> Case:
    """The case with as many layers and rows as the layouts need, the same for all of them: of a pipeline two layers a part, which are a loop."""
    rows, parts = [x.sequences], [1]
    for spelling in layouts:
        try:
            layout = build(spelling, x.full, x.config.data.seq)
        except ValueError:
            continue  # refused below, with this sentence
        rows.append(cut_for(x, layout).micro * layout.size((*layout.batch, *layout.inner)))
        parts.append(2 * layout.stages * chunks_in(layout) if layout.stages > 1 else 1)
    return x._replace(small=shrink(x.model, x.full, max(parts)), sequences=math.lcm(*rows))


def cut_for(x: Case, layout: Layout) -> Case:
    """The case with micro-batches that a layout can run: in a pipeline a multiple of its stages."""
    table = own(layout.options.get(PIPE, ()))
    return x._replace(micro=table.micro if table else math.lcm(x.micro, layout.stages) if layout.stages > 1 else x.micro)


def row(spelling: str, got: Outcome, one: Outcome, lines: list, weights: bool = True) -> Row:
    """A layout's outcome against that of one device.  weights: whether the last weights are compared."""
    worst, gradient = furthest(got.gradient, one.gradient)
    near = lambda a, b: max(abs(x - y) / max(abs(y), 1e-30) for x, y in zip(a, b))
    differences = {
        "loss": near(got.losses, one.losses),
        "gradient": gradient,
        "norm": near(got.norms, one.norms),
        **({"weights": drift(got, one)} if weights else {}),
    }
    start = all(np.array_equal(got.start[name], one.start[name]) for name in one.start)
    return Row(spelling, differences, worst, start, got.replicas, got.stored, tuple(lines))


def furthest(got: dict[str, np.ndarray], one: dict[str, np.ndarray], floor: float = 1e-3) -> tuple[str, float]:
    """The tensor that differs most, and by how much: its largest difference over its largest element. A tensor that is all but zero (the
    gradient of GPT-2's key biases is zero, since softmax ignores what all keys share) is measured against `floor` of the largest of all."""
    top = max(float(np.abs(a).max()) for a in one.values())
    apart = {name: float(np.abs(got[name] - a).max()) / max(float(np.abs(a).max()), floor * top, 1e-30) for name, a in one.items()}
    name = max(apart, key=lambda n: apart[n] if apart[n] == apart[n] else np.inf)
    return name, apart[name]


def drift(got: Outcome, one: Outcome, noise: float = 1e-6) -> float:
    """How far the weights of two runs are apart at the end: the largest L2 norm of a tensor's difference over that of the tensor. Elements whose
    gradient is all but zero (below `noise` of the largest) are left out: an optimizer that scales each element by its own size makes
    steps of their rounding errors."""
    top, far = max(float(np.abs(g).max()) for g in one.gradient.values()), [0.0]
    for name, g in one.gradient.items():
        seen = np.abs(g) > noise * top
        whole = float(np.linalg.norm(one.weights[name]))
        far.append(float(np.linalg.norm((got.weights[name] - one.weights[name])[seen])) / max(whole, 1e-30))
    return float(np.max(far))


def plan_of(x: Case, spelling: str) -> Plan:
    """The plan of one layout of the shrunken model."""
    layout = build(spelling, x.small, SEQ, jax.devices()[0].platform)
    return Plan(make_mesh(layout), layout, how_in(x, layout), x.micro, "float32", _packed(x))


def how_in(x: Case, layout: Layout) -> How:
    """How the layers of a case run under a layout: a pattern of remat keeps its shares over the layers that there are, in a pipeline over a part's."""
    where = placed(x.model, x.small, layout)
    return x.how._replace(remat=resized(x.how.remat, len(where.kinds) if where else x.small.layers))


def _packed(x: Case) -> bool:
    return x.config.data.packing == "documents"


def run(x: Case, spelling: str, steps: int) -> Outcome:
    """Trains a few steps under one layout."""
    plan, config = plan_of(x, spelling), x.config
    train = config.train.model_copy(update={"precision": "fp32"})
    schedule = make_schedule(ScheduleConfig(kind="constant"), config.optimizer.lr, steps)
    step = make_step(x.model, x.small, plan, lm(train.z_loss), config.optimizer, schedule, train, config.seed, 1)
    options = QUICK if plan.layout.platform == "cpu" else None
    params = init(x.model.specs(x.small), jax.random.key(config.seed), step.shardings.params, options)
    start = host(params)
    state = step.start(jitter(x, params))
    held = bytes_of(plan, step, state)
    first = put(batch(x, 0), plan.layout, step)
    program = step.run.lower(state, first).compile(compiler_options=options)
    text, gradient = program.as_text(), None
    if config.optimizer.kind not in EXACT[:2]:
        own, gradient = _gradient(x, plan, state, first, options)
        text = text if config.optimizer.kind in EXACT else own
    found = collectives(text, plan.layout.sizes)
    losses, norms = [], []
    for i in range(steps):
        state, told = program(state, put(batch(x, i), plan.layout, step))
        losses.append(float(told["loss"]) / float(told["tokens"]))
        norms.append(float(told["norm"]))
        if gradient is None:  # the first moment of the first step is the gradient, times a number that is the same for all tensors
            gradient = host(state.opt.mu)
    return Outcome(
        start, gradient, losses, norms, host(state.params), same_everywhere(state), held, found, needed(program.memory_analysis())
    )


def needed(found: Any) -> int:
    """Bytes of a device by a compiler's analysis: arguments, temporaries, and results that are not made in place of arguments."""
    return found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def _gradient(x: Case, plan: Plan, state: State, first: Batch, options: dict | None) -> tuple[str, dict[str, np.ndarray]]:
    """The program up to the gradient, as text, and the first gradient."""
    key = jax.random.key(x.config.seed) if x.small.dropout or x.small.attention_dropout else None
    args = state.params, first, key, state.scale.scale
    program = jax.jit(make_gradient(x.model, x.small, plan, lm(x.config.train.z_loss))).lower(*args).compile(compiler_options=options)
    return program.as_text() or "", host(program(*args)[0])


def jitter(x: Case, params: Tree) -> Tree:
    """Parameters a little off their start: biases not 0, gains not 1, so that a mistake in them shows. Padding stays 0."""

    def one(path: str, s: Spec, a: jax.Array) -> jax.Array:
        noise = np.zeros(s.shape, np.float32)
        rng = np.random.default_rng(list(path.encode()))
        noise[tuple(slice(n) for n in s.used)] = 0.02 * rng.standard_normal(s.used, np.float32)
        return jax.device_put(np.asarray(a) + noise, a.sharding)

    return map_named(one, x.model.specs(x.small), params, is_leaf=is_spec)


def host(tree: Tree) -> dict[str, np.ndarray]:
    """Every array whole, by its path."""
    return {name: np.asarray(a) for name, a in named_leaves(tree).items()}


def bytes_of(plan: Plan, step: Step, state: State) -> tuple[Stored, ...]:
    """What a device stores, counted and by formula."""
    kinds = {"params": "params", "opt": "optimizer", "ema": "average"}
    trees = {said: (getattr(state, name), getattr(step.specs, name)) for name, said in kinds.items()}
    return tuple(Stored(said, counted(arrays), stored(plan.layout, specs)) for said, (arrays, specs) in trees.items() if arrays is not None)


def same_everywhere(tree: Tree) -> bool:
    """Whether devices that hold the same part of an array hold the same bits."""
    for array in jax.tree.leaves(tree):
        seen: dict[str, bytes] = {}
        for shard in array.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            if seen.setdefault(str(shard.index), bits) != bits:
                return False
    return True


def batch(x: Case, number: int) -> Batch:
    """Random tokens; rows of two documents and, in every other row, padding. The same for every layout."""
    rng = np.random.default_rng((x.config.seed, number))
    rows, shape = x.sequences // x.micro, (x.micro, x.sequences // x.micro, SEQ)
    tokens = rng.integers(0, x.small.vocab, (*shape[:2], SEQ + 1)).astype(np.int32)
    segments, border = np.ones(shape, np.int32), SEQ // 3
    segments[..., border:] = 2
    segments[:, ::2, -3:] = 0
    positions = np.where(segments == 1, np.arange(SEQ), np.arange(SEQ) - border).astype(np.int32)
    weights = (segments > 0).astype(np.float32)
    weights[..., border - 1] = 0
    samples = (number * x.sequences + np.arange(x.micro * rows, dtype=np.int32)).reshape(x.micro, rows)
    return Batch(tokens[..., :-1], tokens[..., 1:], weights, segments, positions, samples)


def put(rows: Batch, layout: Layout, step: Step) -> Batch:
    """A batch where the step wants it."""
    where, rows = step.batch_shardings, arranged(layout, rows)
    rows = rows if where.segments is not None else replace(rows, segments=None)
    return jax.tree.map(jax.device_put, rows, where)


assert set(EXACT) <= set(OPTIMIZERS)
