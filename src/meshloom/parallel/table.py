"""The STRATEGIES table and the compact spelling: "data=2 zero3=4 tensor=2 sequence"."""

from meshloom.core.config import nearest
from meshloom.core.layout import Layout
from meshloom.parallel.data import DATA
from meshloom.parallel.sequence import SEQUENCE
from meshloom.parallel.tensor1d import TENSOR
from meshloom.parallel.zero import strategy as zero

STRATEGIES = {s.name: s for s in (DATA, zero(1), zero(2), zero(3), TENSOR, SEQUENCE)}
"""In the order of the mesh, outermost first."""
BESIDE = {"sequence": "tensor"}
"""Strategies that use another's devices instead of a number of their own."""


def parse(spelling: str) -> dict[str, int]:
    """The strategies of a compact spelling and the devices of each, in the order of the mesh. Raises ValueError for what it cannot read."""
    asked: dict[str, int] = {}
    for word in spelling.split():
        name, _, number = word.partition("=")
        if name not in STRATEGIES:
            near = nearest(name, STRATEGIES)
            guess = f" Did you mean '{near}'?" if near else ""
            raise ValueError(f"'{name}' in layout '{spelling}' is not a strategy.{guess} There are: {', '.join(STRATEGIES)}.")
        if name in asked:
            raise ValueError(f"'{name}' stands twice in layout '{spelling}'. Give it once.")
        if name in BESIDE:
            if number:
                raise ValueError(f"'{name}' takes no number: it uses the devices of '{BESIDE[name]}'. Write '{name}'.")
            asked[name] = 0
        elif not number.isdigit() or int(number) < 1:
            raise ValueError(f"'{word}' in layout '{spelling}' needs a number of devices, such as '{name}=2'.")
        else:
            asked[name] = int(number)
    stages = [name for name in asked if name.startswith("zero")]
    if len(stages) > 1:
        raise ValueError(f"Layout '{spelling}' asks for {' and '.join(stages)}. Choose one ZeRO stage.")
    for name, other in BESIDE.items():
        if name in asked:
            if other not in asked:
                raise ValueError(
                    f"'{name}' splits the sequence over the devices of '{other}', which layout '{spelling}' lacks. Add '{other}=2'."
                )
            asked[name] = asked[other]
    return {name: asked[name] for name in STRATEGIES if name in asked}


def spell(asked: dict[str, int]) -> str:
    """The compact spelling of what `parse` returned; "one device" where nothing is split."""
    return " ".join(name if name in BESIDE else f"{name}={n}" for name, n in asked.items()) or "one device"


def build(spelling: str, c, seq: int, platform: str = "cpu") -> Layout:
    """The layout of a spelling for a model and a sequence length. Strategies over one device split nothing and vanish.  platform: of the devices."""
    layout = Layout(platform=platform)
    for name, n in parse(spelling).items():
        if n > 1:
            STRATEGIES[name].check(c, seq, n)
            layout = layout | STRATEGIES[name].layout(n)
    spare = layout.size(layout.acts.get("kv_heads", ()))
    return layout.without("kv_heads") if c.kv_heads % spare else layout


def default(devices: int, c) -> str:
    """The spelling when nobody chose: all devices in ZeRO-3; plain data parallelism where the width does not divide."""
    if devices == 1:
        return ""
    return f"zero3={devices}" if c.embed % devices == 0 else f"data={devices}"
