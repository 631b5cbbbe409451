"""What a plan may choose from: every way to split so many devices among the strategies, and with each of them micro-batches, schedules and remat.

A mesh is a product of strategies in the order of the table: a pipeline, up to two of data and ZeRO (nested, as in HSDP), experts, context, ulysses, and
one way to split the matrices. Options that change results (ZeRO++'s blocks) are never among them, nor a table of the user's own. `sieve` throws out by
divisibility what the strategies' checks would refuse; what is left is asked of the checks themselves.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from meshloom.parallel import pipe
from meshloom.parallel.base import Asked
from meshloom.parallel.table import MATRICES, STRATEGIES, parse, spell
from meshloom.runner.run import REMAT

Array = np.ndarray
REPLICAS = ("data", "zero1", "zero2", "zero3")
"""Strategies of which a mesh has up to NESTED, in this order: what the batch is split over first."""
NESTED = 2
AXES = {"tensor2d": ("rows", "cols"), "tensor25d": ("depth", "rows", "cols"), "tensor3d": ("cube_rows", "cube_embed", "cube_heads")}
"""Mesh axes of the strategies that have several; of any other: its own name."""
OPTIONS = {"expert": ("", "folded"), "tensor2d": ("", "stream"), "tensor25d": ("", "stream")}
"""Options that change what moves, never the result."""
SCHEDULES = ("gpipe", "1f1b", "interleaved2", "interleaved4", "zb")
"""Schedules of a pipeline that are tried, each with stages that keep what their backward needs (stash) and that compute it again."""
BATCH = ("data", "zero1", "zero2", "zero3", "expert", "rows", "depth", "cube_rows")
"""Mesh axes that split the batch."""
EMBED = ("pipe", "zero1", "zero2", "zero3", "rows", "cube_rows", "cube_embed")
"""Mesh axes that split parameters along embed between steps."""


class Pattern(NamedTuple):
    """Which strategies a mesh is a product of. words: their names, in the order of the table. options: strategy -> one that changes no result."""

    words: tuple[str, ...]
    options: Mapping[str, str] = {}

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes, outermost first."""
        return tuple(axis for word in self.words if not STRATEGIES[word].beside for axis in AXES.get(word, (word,)))

    @property
    def kind(self) -> tuple[str, ...]:
        """What a person would call another kind of layout: the strategies beside data and ZeRO, with their options."""
        return tuple(word + self.options.get(word, "") for word in self.words if word not in REPLICAS)

    def spell(self, sizes: Mapping[str, int], pipe: tuple[str, ...] = ()) -> str:
        """The compact spelling with these devices along each mesh axis.  pipe: options of the pipeline."""
        asked = {}
        for word in self.words:
            options = pipe if word == "pipe" else tuple(filter(None, (self.options.get(word, ""),)))
            own = () if STRATEGIES[word].beside else tuple(int(sizes[axis]) for axis in AXES.get(word, (word,)))
            asked[word] = Asked(own, options)
        return spell(asked) if asked else ""


class Allowed(NamedTuple):
    """What may be chosen. remats: rows of runner.REMAT. schedules: of a pipeline. strategies: names. words: words that the layout must have, as a
    spelling ("tensor=8"): a number fixes the devices, options those of the strategy. micro: micro-batches, or None. stash: whether a pipeline's stages may
    keep what their backward needs."""

    remats: tuple[str, ...] = tuple(REMAT)
    schedules: tuple[str, ...] = SCHEDULES
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    words: str = ""
    micro: int | None = None
    stash: tuple[bool, ...] = (False, True)


def patterns(c: Any, allowed: Allowed = Allowed()) -> Iterator[Pattern]:
    """Every product of strategies that a model may have at all; the one device first."""
    fixed = parse(allowed.words)
    may = lambda *names: all(name in allowed.strategies or name in fixed for name in names)
    replicas = [names for n in range(NESTED + 1) for names in itertools.combinations(REPLICAS, n) if may(*names)]
    experts = [(), *([("expert",)] if getattr(c, "experts", 0) and may("expert") else [])]
    ways: list[tuple[str, ...]] = [
        (),
        *((name,) for name in MATRICES if may(name)),
        *([("tensor", "sequence")] if may("tensor", "sequence") else []),
    ]
    rest = [[(), *([(name,)] if may(name) else [])] for name in ("pipe", "context", "ulysses")]
    for stages, data, expert, context, ulysses, way in itertools.product(rest[0], replicas, experts, rest[1], rest[2], ways):
        there = {*stages, *data, *expert, *context, *ulysses, *way}
        if not set(fixed) <= there:
            continue
        words = tuple(name for name in STRATEGIES if name in there)
        choices = [[(word, option) for option in _options(word, words, fixed)] for word in words if word in OPTIONS]
        for options in itertools.product(*choices):
            yield Pattern(words, dict(options))


def _options(word: str, words: tuple[str, ...], fixed: Mapping[str, Asked]) -> tuple[str, ...]:
    """The options of a strategy to try."""
    if word in fixed and fixed[word].options:
        return fixed[word].options[:1]
    beside = word != "expert" or set(MATRICES) & set(words)
    return OPTIONS[word] if beside else ("",)


@functools.lru_cache(maxsize=256)
def factors(n: int, parts: int) -> Array:
    """Every way to write n as a product of so many numbers of 2 or more, in order: int [ways, parts]."""
    if parts == 0:
        return np.ones((int(n == 1), 0), np.int64)
    rows = [[d, *rest] for d in divisors(n) if d > 1 for rest in factors(n // d, parts - 1).tolist()]
    return np.array(rows, np.int64).reshape(-1, parts)


@functools.lru_cache(maxsize=1024)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n, rising."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def meshes(p: Pattern, devices: int, words: str = "") -> dict[str, Array]:
    """Devices along each mesh axis, in every way that a pattern admits: axis -> int [ways].  words: whose numbers are fixed."""
    found = factors(devices, len(p.axes))
    sizes = dict(zip(p.axes, found.T)) if p.axes else {"": found.sum(1)}
    keep = np.ones(len(found), bool)
    for word, asked in parse(words).items():
        for axis, n in zip(AXES.get(word, (word,)), () if STRATEGIES[word].beside else asked.sizes):
            keep &= sizes[axis] == n
    return {axis: n[keep] for axis, n in sizes.items()}


def product(sizes: Mapping[str, Array], axes: tuple[str, ...]) -> Array | int:
    """Devices over these mesh axes; 1 for those that a mesh lacks."""
    out: Array | int = 1
    for axis in axes:
        out = out * sizes[axis] if axis in sizes else out
    return out


def sieve(c: Any, seq: int, sequences: int, p: Pattern, sizes: Mapping[str, Array]) -> Array:
    """Which meshes may be possible, by divisibility alone: bool [ways]. Never refuses what the strategies' checks, the batch and a model's shapes admit."""
    ok = np.ones(len(next(iter(sizes.values()))), bool)
    over = lambda *axes: product(sizes, axes)
    heads = over("tensor", "cols", "cube_heads")
    ok &= sequences % (over(*BATCH) * over("cube_embed")) == 0
    ok &= c.embed % over(*EMBED) == 0
    ok &= c.embed % over("cols") == 0
    ok &= (c.heads % heads == 0) & (c.ffn % heads == 0)
    ok &= c.heads // heads % over("ulysses") == 0
    ok &= c.vocab_padded % (heads * over("pipe")) == 0
    ok &= seq >= 2 * over("context")
    ok &= seq % over("cube_heads") == 0
    ok &= c.layers >= over("pipe")
    if "sequence" in p.words:
        ok &= seq % over("tensor") == 0
    if "stream" in p.options.values():
        ok &= over("rows") == over("cols")
    if getattr(c, "experts", 0):
        folded = p.options.get("expert") == "folded"
        ok &= c.experts % (over("expert") * (heads if folded else 1)) == 0
        ok &= c.expert_ffn % (1 if folded else heads) == 0
        ok &= c.beside % heads == 0
        ok &= "tensor3d" not in p.words and "stream" not in p.options.values()
    return np.broadcast_to(ok, len(ok))


def schedules(p: Pattern, layers: int, stages: int, allowed: Allowed = Allowed()) -> list[tuple[str, ...]]:
    """The options of a pipeline to try, as a spelling has them; of a mesh without one: ()."""
    if "pipe" not in p.words:
        return [()]
    fixed = parse(allowed.words).get("pipe")
    if fixed and fixed.options:
        return [fixed.options]
    chunks = {name: int(name.removeprefix("interleaved")) for name in allowed.schedules if name.startswith("interleaved")}
    fit = [name for name in allowed.schedules if stages * chunks.get(name, 1) <= layers]
    return [(name, *(("stash",) if stash else ())) for name in fit for stash in allowed.stash]


@functools.lru_cache(maxsize=1024)
def chunks_of(options: tuple[str, ...]) -> int:
    """Parts of the layers on each stage under the options of a pipeline; 1 without one."""
    return pipe.chunks_of_options(options) if options else 1
