"""Pipeline parallelism: each device runs some of the layers, and micro-batches follow each other through them.  Sources: GPipe (Huang et al. 2019,
arXiv 1811.06965), 1F1B and its interleaved form (Narayanan et al. 2021, arXiv 2104.04473), zero bubble (Qi et al. 2023, arXiv 2401.10241).

In a step a stage has the weights of its own layers; embedding and head are split over the stages by vocabulary, and all stages work on them
together. Between steps parameters and optimizer state are split along embed, as in ZeRO-1, with all layers in their order: so neither a checkpoint
nor an optimizer knows of stages, and any number of layers is shared evenly. An exchange takes a matrix [layers, embed / stages] to this stage's
layers [layers / stages, embed] when a step starts, and its gradient back at the end.
"""

from pathlib import Path

from meshloom.core.layout import PIPE, Layout
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors
from meshloom.parallel.schedules import INTERLEAVED, SCHEDULES, Schedule, chunks_of, make, read

TABLE = ".csv"
"""How the name of a file with a table of the user's own ends."""
STASH = "stash"
"""The option to keep what a backward pass needs."""


def layout(n: int) -> Layout:
    """Layers over mesh axis `pipe`, and the vocabulary."""
    split = {"layer": (PIPE,), "vocab": (PIPE,)}
    rest = {"embed": (PIPE,), "vocab": (PIPE,)}
    return Layout({PIPE: n}, rest=rest, step=split, live=split, grad=split, acts={"vocab": (PIPE,)})


def schedule_of(options: tuple[str, ...]) -> str:
    """The schedule that the options of a spelling name."""
    return next((option for option in options if option != STASH), "1f1b")


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


def check(c, seq: int, asked: Asked) -> None:
    """Refuses more stages than layers, and two schedules."""
    given = [option for option in asked.options if option != STASH]
    if len(given) > 1:
        raise ValueError(f"A pipeline runs one schedule, and {' and '.join(given)} are asked for. Choose one.")
    table = own(asked.options)
    if table and table.stages != asked.devices:
        raise ValueError(
            f"The table {given[0]} has {table.stages} rows, one a stage, and the layout {asked.devices} stages. Write pipe={table.stages}, or another table."
        )
    fits(c.layers, asked.devices, chunks_of_options(asked.options))
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
    """Not told yet."""
    return ()


def also(option: str) -> bool:
    """Whether an option is a schedule with a number of its own (interleaved4), or a file with a table."""
    return bool(INTERLEAVED.fullmatch(option)) or option.endswith(TABLE)


NAMES = {"interleaved": "interleaved2"}
OPTIONS = {
    **{NAMES.get(name, name): row.what for name, row in SCHEDULES.items()},
    STASH: "a stage keeps what its backward pass needs, and computes nothing again",
}
PIPELINE = Strategy(PIPE, layout, check, cost, "each device runs some of the layers", options=OPTIONS, also=also)
