"""`meshloom schedule`: the timeline of a pipeline, how long its stages stand idle and what they hold, of one schedule or of all side by side.  Allocates
nothing; imports JAX only to count the bytes of a model."""

import sys
from pathlib import Path
from typing import Any

from meshloom.parallel.schedules import Schedule, chunks_of, described, make, read, write
from meshloom.plan import ticks
from meshloom.plan.page import check
from meshloom.plan.timeline import Study, draw, study

WIDE = 100
"""Columns where no terminal says how many it has."""
SHOWN = ("gpipe", "1f1b", "interleaved2", "interleaved4", "zb")
"""Schedules that stand side by side."""
MOST = 200_000
"""Pieces of work that a table may have here."""


def show(
    stages: int | None = None,
    micro: int | None = None,
    name: str | None = None,
    table: Path | None = None,
    config: Any = None,
    stash: bool = False,
    pictures: tuple[Path, ...] = (),
    csv: Path | None = None,
    every: bool = False,
) -> None:
    """Prints one schedule, and all side by side where neither a name nor a table is given, or `every` asks for it; writes pictures and the table.
    config: the recipe (`RunConfig`) whose bytes are counted.  stash: stages keep what the backward needs, not inputs alone.  pictures: .svg, .png.
    Raises ValueError for what does not fit."""
    from rich.console import Console

    for path in pictures:
        check(path)
    found, left = asked(stages, micro, name, table, config, stash)
    one = bool(name or table)
    if csv and not one:
        raise ValueError("--csv writes the table of one schedule. Name it with --schedule, as in --schedule 1f1b.")
    for path in pictures:
        draw(found, path)
    if csv:
        write(found[0].table.schedule, csv)
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    if one:
        ticks.show(found[0], console)
    if one and every:
        s = found[0].table.schedule
        others, left = asked(s.stages, s.micro, None, None, config, stash)
        console.print()
        ticks.compare([*(found if table else ()), *others], left, console)
    if not one:
        ticks.compare(found, left, console)
    for path in (*pictures, *([csv] if csv else [])):
        console.print(f"Written: {path}", soft_wrap=True)


def asked(
    stages: int | None, micro: int | None, name: str | None, table: Path | None, config: Any = None, stash: bool = False
) -> tuple[list[Study], dict[str, str]]:
    """What is to be shown, and of the schedules that stand side by side those that do not fit, with why."""
    if table:
        schedules, left = [_own(table, stages, micro, name)], {}
    else:
        micro = config.batch.micro_batches if micro is None and config else micro
        for flag, n in (("--stages", stages), ("--micro", micro)):
            if n is None:
                raise ValueError(
                    f"{flag} is missing. Give --stages and --micro, as in --stages 4 --micro 16, or a table of your own: --table FILE.csv."
                )
        assert stages is not None and micro is not None
        schedules, left = _named(stages, micro, name)
    studies = [study(s, stash) if table else study(s, stash, described(s.name)) for s in schedules]
    if config:
        studies, more = _counted(studies, config, stash, one=bool(name or table))
        left = {**left, **more}
    return studies, left


def _own(path: Path, stages: int | None, micro: int | None, name: str | None) -> Schedule:
    """A user's own table.  Raises ValueError where flags say otherwise."""
    if name:
        raise ValueError(f"--table {path} and --schedule {name} are two schedules. Give one of them.")
    s = read(path)
    for flag, said, n, what in (("--stages", stages, s.stages, "stages"), ("--micro", micro, s.micro, "micro-batches")):
        if said is not None and said != n:
            raise ValueError(f"{path} is a table of {n} {what}, and {flag} says {said}. Leave {flag} out, or give another table.")
    return s


def _named(stages: int, micro: int, name: str | None) -> tuple[list[Schedule], dict[str, str]]:
    """The schedule of a name; without one, all that fit."""
    most = max(chunks_of(name) if name else 4, 1) * stages * micro * 3
    if most > MOST:
        raise ValueError(
            f"{stages} stages and {micro} micro-batches make {most:,} pieces of work, more than can be shown; {MOST:,} is the most. Give fewer "
            "micro-batches: between the ends of a step the same ticks repeat."
        )
    if name:
        return [make(name, stages, micro)], {}
    found, left = [], {}
    for each in SHOWN:
        try:
            found.append(make(each, stages, micro))
        except ValueError as error:
            if each == SHOWN[0]:
                raise  # what fits none
            left[each] = str(error)
    return found, left


def _counted(studies: list[Study], config: Any, stash: bool, one: bool) -> tuple[list[Study], dict[str, str]]:
    """Schedules with the bytes of a recipe's model, and those that it has too few layers for."""
    from meshloom.core.layout import PIPE
    from meshloom.parallel.pipe import fits, layers_of
    from meshloom.parallel.table import build, parse
    from meshloom.plan.cost import shapes
    from meshloom.plan.flight import flight
    from meshloom.recipes.launch import DTYPES, check_length, model_of
    from meshloom.recipes.layout import drawable
    from meshloom.runner.place import place
    from meshloom.runner.run import How

    model, c, _ = model_of(config)
    check_length(config, c)
    s = studies[0].table.schedule
    fits(c.layers, s.stages, s.chunks)
    spelling = " ".join(word for word in config.layout.split() if word != "auto" and not word.startswith("pipe"))
    lay, how, data = build(spelling, c, config.data.seq), How("scan", drawable(config.train.remat)), config.data
    dtype, packed = DTYPES[config.train.precision], data.packing == "documents"
    pipe = parse(config.layout).get(PIPE) if config.layout != "auto" else None
    stated = layers_of(pipe.options) if pipe else ()
    said = config.name + (f" under {spelling} besides" if spelling else "")
    x = shapes(model, c, lay, data.seq, config.batch.sequences, s.micro, how, dtype, packed)
    found, left = [], {}
    for each in studies:
        s = each.table.schedule
        try:
            fits(c.layers, s.stages, s.chunks)
            layers = len(place(model.kinds(c), s.stages, s.chunks, stated if len(stated) == s.stages * s.chunks else ()).kinds)
            found.append(each._replace(flight=flight(each.table, x, layers, said, stash)))
        except ValueError as error:
            if one:
                raise
            left[each.name] = str(error)
    return found, left
