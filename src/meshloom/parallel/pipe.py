"""Pipeline parallelism: each device runs some of the layers, and micro-batches follow each other through them.  Sources: GPipe (Huang et al. 2019,
arXiv 1811.06965), 1F1B and its interleaved form (Narayanan et al. 2021, arXiv 2104.04473), zero bubble (Qi et al. 2023, arXiv 2401.10241).

In a step a stage has the weights of its own layers; embedding and head are split over the stages by vocabulary, and all stages work on them
together. Between steps parameters and optimizer state are split along embed, as in ZeRO-1, with all layers in their order: so neither a checkpoint
nor an optimizer knows of stages, and any number of layers is shared evenly. An exchange takes a matrix [layers, embed / stages] to this stage's
layers [layers / stages, embed] when a step starts, and its gradient back at the end.
"""

import functools
import re
from pathlib import Path

from meshloom.core.layout import PIPE, Layout
from meshloom.core.leaf import split_seq
from meshloom.core.tree import Same
from meshloom.parallel.base import LAYER, PLACES, Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge
from meshloom.parallel.flow import Flow, Ticks
from meshloom.parallel.schedules import INTERLEAVED, SCHEDULES, Schedule, chunks_of, make, read
from meshloom.parallel.slots import Table, arrivals, compile, segments
from meshloom.parallel.tensor1d import loss

TABLE = ".csv"
"""How the name of a file with a table of the user's own ends."""
STASH = "stash"
"""The option to keep what a backward pass needs."""
SKIP = "skip"
"""The option to leave out what a stage has no layer for."""
STATED = re.compile(r"\d+(\+\d+)*")
"""The option that says how many layers each part has."""


def layout(n: int) -> Layout:
    """Layers over mesh axis `pipe`, and the vocabulary."""
    split = {"layer": (PIPE,), "vocab": (PIPE,)}
    rest = {"embed": (PIPE,), "vocab": (PIPE,)}
    return Layout({PIPE: n}, rest=rest, step=split, live=split, grad=split, acts={"vocab": (PIPE,)})


def schedule_of(options: tuple[str, ...]) -> str:
    """The schedule that the options of a spelling name."""
    return next(iter(schedules_of(options)), "1f1b")


def schedules_of(options: tuple[str, ...]) -> list[str]:
    """All schedules that the options of a spelling name."""
    return [option for option in options if option not in (STASH, SKIP) and not STATED.fullmatch(option)]


def layers_of(options: tuple[str, ...]) -> tuple[int, ...]:
    """Layers of each part, in the order of the model, as the options of a spelling say; () where they do not."""
    found = next((option for option in options if STATED.fullmatch(option)), "")
    return tuple(int(n) for n in found.split("+")) if found else ()


def layers_in(lay: Layout) -> tuple[int, ...]:
    """Layers of each part of a layout's pipeline, in the order of the model; () where it does not say."""
    return layers_of(lay.options.get(PIPE, ()))


def own(options: tuple[str, ...]) -> Schedule | None:
    """The user's own table, where the options name a file."""
    name = schedule_of(options)
    return read(Path(name).expanduser()) if name.endswith(TABLE) else None


def chunks_of_options(options: tuple[str, ...]) -> int:
    """Parts of the layers on each stage, as the options of a spelling say."""
    table = own(options)
    return table.chunks if table else chunks_of(schedule_of(options))


def chunks_in(lay: Layout) -> int:
    """Parts of the layers on each stage of a layout's pipeline."""
    return chunks_of_options(lay.options.get(PIPE, ()))


def schedule_in(lay: Layout, micro: int) -> Schedule:
    """The schedule of a layout's pipeline.  Raises ValueError where so many micro-batches do not fit it."""
    options = lay.options.get(PIPE, ())
    table = own(options)
    if table is None:
        return make(schedule_of(options), lay.stages, micro)
    if table.micro != micro:
        raise ValueError(
            f"The table {schedule_of(options)} is of {table.micro} micro-batches, and the batch is cut into {micro}. "
            f"Set batch.micro_batches to {table.micro}, or leave it out."
        )
    return table


def table_of(lay: Layout, micro: int) -> Table | None:
    """The table of a layout's pipeline; None for one without.  Raises ValueError where the micro-batches do not fit it."""
    if lay.stages == 1:
        return None
    options = lay.options.get(PIPE, ())
    return compile(schedule_in(lay, micro)) if own(options) else _named(schedule_of(options), lay.stages, micro)


@functools.lru_cache(maxsize=512)
def _named(name: str, stages: int, micro: int) -> Table:
    """The table of a schedule by its name: a search over layouts asks for the same ones again and again."""
    return compile(make(name, stages, micro))


def stashes(lay: Layout) -> bool:
    """Whether a stage keeps what its backward pass needs, and computes nothing again."""
    return STASH in lay.options.get(PIPE, ())


def skips(lay: Layout) -> bool:
    """Whether a stage computes no slots that none of its layers fills."""
    return SKIP in lay.options.get(PIPE, ())


def check(c, seq: int, asked: Asked) -> None:
    """Refuses more stages than layers, two schedules, and layers of stages that are not the model's."""
    given = schedules_of(asked.options)
    if len(given) > 1:
        raise ValueError(f"A pipeline runs one schedule, and {' and '.join(given)} are asked for. Choose one.")
    table = own(asked.options)
    if table and table.stages != asked.devices:
        raise ValueError(
            f"The table {given[0]} has {table.stages} rows, one a stage, and the layout {asked.devices} stages. Write pipe={table.stages}, or another table."
        )
    fits(c.layers, asked.devices, chunks_of_options(asked.options))
    _stated(c.layers, asked)
    if c.vocab_padded % asked.devices:
        raise ValueError(
            f"A pipeline splits the vocabulary, and {c.vocab_padded} rows (vocab {c.vocab}, padded) cannot be split over {asked.devices} stages. "
            f"Set model.vocab_multiple to a multiple of {asked.devices}, or use one of {divisors(c.vocab_padded)} stages."
        )
    if c.embed % asked.devices:
        raise ValueError(
            f"A pipeline keeps parameters split along embed between steps, and embed {c.embed} cannot be split over {asked.devices} stages. "
            f"Use one of {divisors(c.embed)} stages."
        )


def _stated(layers: int, asked: Asked) -> None:
    """Refuses stated layers that are not as many as there are parts, not the model's, or none."""
    said = [option for option in asked.options if STATED.fullmatch(option)]
    if len(said) > 1:
        raise ValueError(f"A pipeline has one split of its layers, and {' and '.join(said)} are asked for. Choose one.")
    sizes, chunks = layers_of(asked.options), chunks_of_options(asked.options)
    parts = asked.devices * chunks
    if not sizes:
        return
    even = "+".join(str(layers // parts + (at < layers % parts)) for at in range(parts))
    if len(sizes) != parts:
        of = f"{asked.devices} stages of {chunks} chunks are {parts} parts" if chunks > 1 else f"there are {parts} stages"
        raise ValueError(f"'{said[0]}' gives the layers of {len(sizes)} parts, and {of}. Give {parts} numbers, such as {even}.")
    if 0 in sizes:
        raise ValueError(f"'{said[0]}' gives a stage no layer; each has one at least. Write {even}, or use fewer stages.")
    if sum(sizes) != layers:
        raise ValueError(f"'{said[0]}' is {sum(sizes)} layers, and the model has {layers}. Let the numbers add up to that, such as {even}.")


def still(c, seq: int, lay: Layout) -> None:
    """Refuses `skip` where a layer moves something between devices, in which all that do take part, and where what a backward pass needs is kept."""
    if not skips(lay):
        return
    if stashes(lay):
        raise ValueError("'skip' leaves slots out, and 'stash' keeps what every slot's backward pass needs. Use one of them.")
    within = lay.within
    inside = [over for table in ("step", "live", "grad") for over in getattr(within, table).values()]
    moving = {a for over in inside for a in over} | {a for over in within.acts.values() for a in over if a not in within.batch}
    if moving:
        raise ValueError(
            f"'skip' leaves out the slots that a stage has no layer for, and under this layout a layer moves something over {', '.join(sorted(moving))}, in "
            "which the devices of all stages keep step. Leave 'skip' out, or split by data and zero1 alone beside the pipeline."
        )


def fits(layers: int, stages: int, chunks: int) -> None:
    """Refuses more parts than a model has layers."""
    if stages * chunks > layers:
        parts = f"{stages} stages of {chunks} chunks take {stages * chunks}" if chunks > 1 else f"{stages} stages take {stages}"
        most = layers // chunks
        raise ValueError(
            f"The model has {layers} layers, and {parts}: each part has one at least. "
            + (f"Use {most} stage{'s' * (most > 1)} at most" if most else f"Use {layers} chunks at most")
            + (", or a schedule with fewer chunks." if chunks > 1 else ", or a deeper model.")
        )


def cost(x: Shapes) -> tuple[Collective, ...]:
    """What only a pipeline moves, and what moves at its ends, where all stages and the devices of tensor parallelism work together.

    Once a step each matrix of the layers is exchanged, in the type of the arithmetic; its gradient back, fp32. What is not split along embed between
    steps (gains, biases behind the matrices) is there already, and its gradient is summed with those of the stages that do not have it.
    Every tick with a forward passes an activation on, every tick with a backward its gradient.
    Every micro-batch: one sum for the embedding; two to share what leaves at the last stage and, backward, at the first; one for the head's input
    backward; those of the loss.
    """
    lay, n = x.layout, x.micro
    assert x.flow
    often = x.flow.ticks
    there = x.residual // lay.size(split_seq(lay)) // lay.size(lay.stream)
    edge = tuple(a for a in lay.acts["vocab"] if a not in (*split_seq(lay), *lay.stream))
    back = x.residual // lay.size(lay.inner)
    reduce = lambda axes, size, place, why: Collective("all-reduce", axes, n, n * size, place, why)
    return merge(
        [
            *exchanges(x),
            Collective("collective-permute", (PIPE,), often.sent, often.sent * there, "send", "activations, to the next stage"),
            Collective(
                "collective-permute", (PIPE,), often.sent_back, often.sent_back * there, "send back", "their gradients, to the stage before"
            ),
            reduce(edge, there, "embed", "the embedding"),
            reduce((PIPE,), there, "head", "the last stage's activations, to all"),
            reduce(edge, back, "head back", "the head, backward"),
            reduce((PIPE,), there, "embed back", "the first stage's gradients, to all"),
            *loss(x, PIPE),
            *joined(x),
            *gradient_sums(x, PIPE),
        ]
    )


def exchanges(x: Shapes) -> list[Collective]:
    """Layers from where they rest to their stages, and their gradients back."""
    found = []
    for s in x.leaves.values():
        if s.axes[0] != "layer":
            continue
        size, settled = x.elements("rest", s), s.frozen or s.role == "settled"
        if x.layout.exchanged(s.axes) is None:
            whole = size // s.shape[0] * s.used[0] * 4
            found.append(
                Collective("all-reduce", (PIPE,), 0 if settled else 1, 0 if settled else whole, "end", "gradients of small arrays")
            )
            continue
        found.append(Collective("all-to-all", (PIPE,), 1, size * x.width_of(s), "start", "layers, to their stages"))
        found.append(Collective("all-to-all", (PIPE,), 0 if settled else 1, 0 if settled else 4 * size, "end", "gradients of layers, back"))
    return found


def joined(x: Shapes) -> list[Collective]:
    """What layers told, from their stages to all, once a step, fp32."""
    telling = sum(kind.tells for kind in x.kinds)
    size = telling * x.told.load + x.told.sums
    return [Collective("all-reduce", (PIPE,), 1 + x.told.sums if telling else 0, 4 * size, "end", "what layers told")]


def ticks(table: Table) -> Ticks:
    """How often the parts of a step's program run. Ticks with the same kinds of work are one loop, and send if anything arrives in any of them."""
    return _ticks(Same(table))


@functools.lru_cache(maxsize=512)
def _ticks(same: Same) -> Ticks:
    table = same.of
    found, there = [0] * len(Ticks._fields), arrivals(table.schedule)
    for start, stop, kinds in segments(table):
        arrive = (bool(ticks[start:stop].any()) for ticks in there.values())
        found = [n + (stop - start) * active for n, active in zip(found, (*kinds, *arrive))]
    return Ticks(*found)


def flow(lay: Layout, micro: int, parts: int, seen: bool, heavy: tuple = ()) -> Flow:
    """What a pipeline makes of a step.  Embedding and head gather their weights once a micro-batch each; ticks that are no turn of a loop are one piece
    of straight code, of which a CPU's compiler gathers once."""
    table = table_of(lay, micro)
    assert table
    alone = [start for start, stop, _ in segments(table) if stop - start == 1 and lay.platform == "cpu"]
    straight = [int((table.columns[name][alone, 0] >= 0).sum()) for name in ("enter", "leave")]
    once = lambda n: max(0, n - 1)
    return Flow(
        parts,
        seen and not stashes(lay),
        table.schedule.splits,
        (micro - once(straight[0]), micro - once(straight[1]), 2 * micro - once(sum(straight))),
        ticks(table),
        heavy if skips(lay) else (),
    )


FORWARD = ("rows", "weights", "layer", "layer end")
"""Places that come in every tick with a forward and, where a stage does not keep what it needs, in every tick with a backward, which computes it again."""
BACKWARD = ("weights again", "layer again", "layer back", "gradients")
"""Places that come in every tick with a backward."""


def ticks_of(x: Shapes, place: str) -> tuple[str, ...]:
    """The kinds of ticks (fields of Ticks) that come to a place where each device runs one part of its layers, whether there is work for it or not;
    () for places that come once a micro-batch, or a step."""
    again = "forward" if stashes(x.layout) else "backward"
    kinds = {"told": (again,), "gradients late": ("weight",), **dict.fromkeys(BACKWARD, ("backward",))}
    return tuple(dict.fromkeys(("forward", again))) if place in FORWARD else kinds.get(place, ())


def part(x: Shapes, c: Collective) -> Collective:
    """Of what a strategy tells of all layers and micro-batches, what one part of the layers moves in one tick."""
    each = x.micro * (x.parts if PLACES[c.place].often == LAYER else 1)
    assert c.count % each == c.bytes % each == 0, c
    return c._replace(count=c.count // each, bytes=c.bytes // each)


def unused(x: Shapes) -> tuple[str, ...]:
    """Places that a backward spares where it computes the last layer of a part again: nobody reads its output. A compiler finds that out where the
    layer is no turn of a loop. What is computed once more for the backward pass itself is then not needed either, but for what a layer tells."""
    if not x.flow or not x.flow.seen:
        return ()
    again = x.remat == "full" and not x.run[-1].tells
    return ("layer end", *(("layer",) if again else ()), *(("weights",) if again and not x.merged else ()))


def also(option: str) -> str:
    """What an option does that is no row of OPTIONS: a schedule with a number of its own (interleaved4), a file with a table, the layers of each part;
    "" for what is no option."""
    if option.endswith(TABLE):
        return "a table of your own"
    if STATED.fullmatch(option):
        return "layers of each part, in the order of the model"
    return OPTIONS[NAMES["interleaved"]] if INTERLEAVED.fullmatch(option) else ""


NAMES = {"interleaved": "interleaved2"}
OPTIONS = {
    **{NAMES.get(name, name): row.what for name, row in SCHEDULES.items()},
    STASH: "a stage keeps what its backward pass needs, and computes nothing again",
    SKIP: "a stage computes no slots that none of its layers fills",
}
PIPELINE = Strategy(PIPE, layout, check, cost, "each device runs some of the layers", options=OPTIONS, also=also, fits=still)
