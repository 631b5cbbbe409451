"""Expert parallelism: each device has its own experts, and its own share of the batch for everything else.

Sources: GShard, Lepikhin 2020, arXiv 2006.16668; experts over the tensor axis too ("folded"): Liu 2025, arXiv 2504.14960.
Memory: experts / n, all else whole.  What moves in each layer with experts, n devices, [tokens, embed] on one: `ops/dispatch.py` says why.
capacity: two all-to-alls of [experts, rows x room, embed] forward, two backward.
dropless: forward a gather of [n tokens, embed] and of their choices, a scatter of [n tokens, embed]; backward the other way round.
Beside tensor parallelism the experts' width is split over the tensor axis; `folded` splits the experts over it instead and keeps them whole: an
all-to-all then carries what goes to this device's experts alone.
"""

from meshloom.core.layout import TABLES, Layout
from meshloom.ops.dispatch import across
from meshloom.ops.moe import capacity
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge

SPLIT = {"expert": ("expert",)}


def layout(n: int) -> Layout:
    """Experts over mesh axis `expert`, in every table; the batch too."""
    return Layout({"expert": n}, rest=SPLIT, step=SPLIT, live=SPLIT, grad=SPLIT, acts={"batch": ("expert",), **SPLIT})


def folded(lay: Layout) -> Layout:
    """The layout with the experts over what splits their width, and that whole."""
    tables = {}
    for name in TABLES:
        table = dict(getattr(lay, name))
        table["expert"] = (*table["expert"], *table.pop("expert_ffn", ()))
        tables[name] = table
    return Layout(lay.sizes, **tables, platform=lay.platform, options=lay.options)


def check(c, seq: int, asked: Asked) -> None:
    """Refuses a model without experts, and experts that the devices do not divide."""
    n, experts = asked.devices, getattr(c, "experts", 0)
    if not experts:
        raise ValueError(
            f"expert={n} splits experts, and this model has none. Use data={n} or zero3={n}, or a family with experts (model.family: moe)."
        )
    if experts % n:
        raise ValueError(f"{experts} experts cannot be split over expert={n} devices. Use expert= one of {divisors(experts)}.")


def fits(c, seq: int, lay: Layout) -> None:
    """Refuses folding where nothing else splits the experts' width."""
    if "folded" in lay.options.get("expert", ()) and lay.live["expert"] == SPLIT["expert"]:
        raise ValueError(
            "'folded' splits the experts over the devices of tensor parallelism too, and the layout has none. "
            "Add tensor=2 or tensor2d=2x2, or leave out ':folded'."
        )


def cost(x: Shapes) -> tuple[Collective, ...]:
    """What each layer with experts exchanges, every micro-batch; and gradients of all else once a step."""
    axes = across(x.layout)
    exchanged = _by_capacity(x, axes) if x.config.capacity else _dropless(x, axes)
    return merge([*exchanged, *gradient_sums(x, "expert")])


def _layers(x: Shapes) -> int:
    """Layers with experts."""
    return sum(kind.tells for kind in x.run)


def _dropless(x: Shapes, axes: tuple[str, ...]) -> list[Collective]:
    """Gathers of the tokens, their experts (int32) and weights (fp32), and the scatter of the results. Backward: the results' gradient is gathered,
    those of tokens and weights are scattered. Where a layer is computed again, its gathers are too; not the scatter, which ends it."""
    c, times = x.config, x.micro * _layers(x)
    tokens = x.rows * x.seq * x.layout.size(axes)
    rows, choices = tokens * c.embed * x.width, tokens * c.top * 4
    again = times if x.remat != "none" else 0
    into = "layer end" if x.remat == "full" else "layer"
    return [
        Collective("all-gather", axes, times, times * rows, into, "tokens to the experts"),
        Collective("all-gather", axes, 2 * times, 2 * times * choices, into, "their choices"),
        Collective("reduce-scatter", axes, times, times * rows, "layer end", "results of the experts"),
        Collective("all-gather", axes, times, times * rows, "layer back", "results of the experts, backward"),
        Collective("reduce-scatter", axes, times, times * rows, "layer back", "tokens to the experts, backward"),
        Collective("reduce-scatter", axes, times, times * choices, "layer back", "their choices, backward"),
        Collective("all-gather", axes, again, again * rows, "layer again", "tokens to the experts, recomputed"),
        Collective("all-gather", axes, 2 * again, 2 * again * choices, "layer again", "their choices, recomputed"),
    ]


def _by_capacity(x: Shapes, axes: tuple[str, ...]) -> list[Collective]:
    """The buffers there and back, and the same backward; both again under remat `full`."""
    c, times = x.config, x.micro * _layers(x)
    owned = c.experts // x.layout.size(x.layout.live["expert"]) * x.layout.size(axes)
    size = owned * x.rows * capacity(x.seq, c.top, c.experts, c.capacity) * c.embed * x.width
    again, place = (2 * times, "layer end") if x.remat == "full" else (0, "layer")
    return [
        Collective("all-to-all", axes, 2 * times, 2 * times * size, place, "tokens to the experts and back"),
        Collective("all-to-all", axes, 2 * times, 2 * times * size, "layer back", "tokens to the experts and back, backward"),
        Collective("all-to-all", axes, again, again * size, "layer again", "tokens to the experts and back, recomputed"),
    ]


EXPERT = Strategy(
    "expert",
    layout,
    check,
    cost,
    "experts are split, and the batch with them",
    options={"folded": "experts are split over the tensor axis too, and their width is whole"},
    finish={"folded": folded},
    fits=fits,
)
