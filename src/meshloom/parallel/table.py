"""The STRATEGIES table and the compact spelling: "data=2 zero3=4 tensor=2 sequence"."""

import math
from collections.abc import Mapping

from meshloom.core.config import nearest
from meshloom.core.layout import Layout
from meshloom.parallel.base import Asked, Strategy, divisors
from meshloom.parallel.context import CONTEXT
from meshloom.parallel.data import DATA
from meshloom.parallel.expert import EXPERT
from meshloom.parallel.pipe import PIPELINE
from meshloom.parallel.sequence import SEQUENCE
from meshloom.parallel.tensor1d import TENSOR
from meshloom.parallel.tensor2d import TENSOR2D
from meshloom.parallel.tensor3d import TENSOR3D
from meshloom.parallel.tensor25d import TENSOR25D
from meshloom.parallel.ulysses import ULYSSES
from meshloom.parallel.zero import strategy as zero

STRATEGIES = {
    s.name: s
    for s in (PIPELINE, DATA, zero(1), zero(2), zero(3), EXPERT, CONTEXT, ULYSSES, TENSOR3D, TENSOR25D, TENSOR2D, TENSOR, SEQUENCE)
}
"""In the order of the mesh, outermost first."""
STAGES = tuple(f"zero{stage}" for stage in (1, 2, 3))
"""Strategies that may be nested in this order, each inside the one before."""
MATRICES = ("tensor", "tensor2d", "tensor25d", "tensor3d")
"""Ways to split the matrices themselves: a layout has one."""


def parse(spelling: str) -> dict[str, Asked]:
    """The strategies of a compact spelling, in the order of the mesh. A word is a name, `name=8`, or `name=2x4` where a strategy has several mesh
    axes, with `:option,option` behind it. Raises ValueError for what it cannot read."""
    asked: dict[str, Asked] = {}
    for word in spelling.split():
        name = word.partition("=")[0].partition(":")[0]
        if name not in STRATEGIES:
            near = nearest(name, STRATEGIES)
            guess = f" Did you mean '{near}'?" if near else ""
            raise ValueError(f"'{name}' in layout '{spelling}' is not a strategy.{guess} There are: {', '.join(STRATEGIES)}.")
        if name in asked:
            raise ValueError(f"'{name}' stands twice in layout '{spelling}'. Give it once.")
        asked[name] = _word(STRATEGIES[name], word, spelling)
    stages = [name for name in asked if name in STAGES]
    if stages != sorted(stages):
        right = " ".join(_spelled(name, asked[name]) for name in sorted(stages))
        raise ValueError(
            f"Layout '{spelling}' has {' outside '.join(stages)}: what the inner stage keeps whole, the outer one could not split. "
            f"Of several ZeRO stages the lowest stands outside. Write '{right}', or give each the other's devices."
        )
    ways = [name for name in asked if name in MATRICES]
    if len(ways) > 1:
        raise ValueError(f"Layout '{spelling}' asks for {' and '.join(ways)}, which all split the matrices. Choose one, with more devices.")
    for name in asked:
        other = STRATEGIES[name].beside
        if other and ways and other not in asked:
            raise ValueError(
                f"'{name}' splits the sequence over the devices of '{other}', and layout '{spelling}' splits the matrices by {ways[0]}. "
                f"Leave '{name}' out, or write '{other}' in place of {ways[0]}."
            )
        if other and other not in asked:
            raise ValueError(
                f"'{name}' splits the sequence over the devices of '{other}', which layout '{spelling}' lacks. Add '{other}=2'."
            )
        if other:
            asked[name] = asked[name]._replace(sizes=asked[other].sizes)
    return {name: asked[name] for name in STRATEGIES if name in asked}


def _word(s: Strategy, word: str, spelling: str) -> Asked:
    """One word of a spelling."""
    said, _, behind = word.partition(":")
    number, options = said.partition("=")[2], tuple(behind.split(",")) if ":" in word else ()
    if "" in options or len(set(options)) < len(options):
        raise ValueError(f"'{word}' in layout '{spelling}' gives an option twice, or none behind its colon or comma. Give each once.")
    for option in options:
        if option not in s.options and not s.also(option):
            near = nearest(option, s.options)
            known = f"It has: {', '.join(s.options)}." if s.options else "It has none."
            guess = f" Did you mean '{near}'?" if near else ""
            raise ValueError(f"'{option}' in layout '{spelling}' is not an option of '{s.name}'.{guess} {known}")
    if s.beside:
        if number:
            raise ValueError(f"'{s.name}' takes no number: it uses the devices of '{s.beside}'. Write '{s.name}'.")
        return Asked((), options)
    sizes = number.split("x")
    if "=" in number:
        raise ValueError(f"'{word}' in layout '{spelling}' is more than one word. Put spaces between them, as in 'data=2 tensor=4'.")
    if not all(size.isdigit() and int(size) >= 1 for size in sizes):
        raise ValueError(
            f"'{word}' in layout '{spelling}' needs a number of devices, such as '{s.name}={math.prod(s.sizes(1)) * 2**s.axes}'."
        )
    if len(sizes) == 1:
        return Asked(s.sizes(int(number)), options)
    if len(sizes) != s.axes:
        axes = f"{s.axes} mesh axes" if s.axes > 1 else "one mesh axis"
        raise ValueError(f"'{word}' in layout '{spelling}' gives {len(sizes)} sizes, and '{s.name}' has {axes}.")
    return Asked(tuple(int(size) for size in sizes), options)


def spell(asked: Mapping[str, Asked]) -> str:
    """The compact spelling of what `parse` returned; "one device" where nothing is split."""
    return " ".join(_spelled(name, a) for name, a in asked.items()) or "one device"


def _spelled(name: str, a: Asked) -> str:
    number = "" if STRATEGIES[name].beside else f"={'x'.join(str(n) for n in a.sizes)}"
    return name + number + (":" + ",".join(a.options) if a.options else "")


def devices(spelling: str) -> int:
    """Devices that a spelling takes."""
    return math.prod(a.devices for name, a in parse(spelling).items() if not STRATEGIES[name].beside)


def build(spelling: str, c, seq: int, platform: str = "cpu") -> Layout:
    """The layout of a spelling for a model and a sequence length. Strategies over one device split nothing and vanish.  platform: of the devices."""
    layout = Layout(platform=platform)
    found = {name: asked for name, asked in parse(spelling).items() if asked.devices > 1}
    for name, asked in found.items():
        STRATEGIES[name].check(c, seq, asked)
        options = {name: asked.options} if asked.options else {}
        layout = layout | STRATEGIES[name].layout(*asked.sizes) | Layout(options=options)
    for name, options in layout.options.items():
        for option in options:
            layout = STRATEGIES[name].finish.get(option, lambda same: same)(layout)
    for name, said, size in split_by_several(c):
        over = layout.rest.get(name, ())
        if size % layout.size(over):
            by = " x ".join(f"{a}={layout.sizes[a]}" for a in over)
            raise ValueError(
                f"{said} {size} cannot be split over {layout.size(over)} devices ({by}). Use sizes whose product is one of {divisors(size)}."
            )
    for name in found:
        STRATEGIES[name].fits(c, seq, layout)
    c.check_layout(layout)
    spare = layout.size(layout.acts.get("kv_heads", ()))
    return layout.without("kv_heads") if c.kv_heads % spare else layout


def split_by_several(c) -> tuple[tuple[str, str, int], ...]:
    """Sizes that no one strategy can check, since several may split them: axis, what it is called, size."""
    found = [("embed", "embed", c.embed)]
    if getattr(c, "experts", 0):
        found += [
            ("expert", "experts", c.experts),
            ("expert_ffn", "expert_ffn", c.expert_ffn),
            ("ffn", "the width of the MLP beside the experts", c.beside),
        ]
    return tuple(found)


def default(devices: int, c) -> str:
    """The spelling when nobody chose: all devices in ZeRO-3; plain data parallelism where the width does not divide."""
    if devices == 1:
        return ""
    return f"zero3={devices}" if c.embed % devices == 0 else f"data={devices}"
