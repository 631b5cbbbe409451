"""Bytes of what a pipeline has in flight: the ring buffers of a schedule, filled with one model's activations.  By shapes; allocates nothing."""

from typing import Any

from meshloom.parallel.base import Shapes
from meshloom.parallel.slots import Table
from meshloom.plan.memory import kept
from meshloom.plan.timeline import Flight, Ring

HOLDS = {
    "kept": "inputs, from F to B",
    "inbox": "activations that have arrived",
    "grads": "gradients that have arrived",
    "late": "what B leaves for W",
}
"""Ring buffer -> what it holds."""


def flight(table: Table, x: Shapes, name: str, stash: bool = False) -> Flight:
    """What a schedule holds of a model.  x: one micro-batch on one device of a stage.  name: the model's.  stash: whether F keeps what the backward
    needs, not its input alone.  Raises ValueError for more parts than layers.

    What W needs is the inputs of products with weights and the gradients of their results: about twice the results, an estimate."""
    s, c = table.schedule, x.config
    fits(c, s.stages, s.chunks)
    layers = -(-c.layers // (s.stages * s.chunks))
    one, residuals = kept(x._replace(remat="full")), layers * kept(x)
    again = residuals + (kept(x._replace(remat="none")) if x.remat != "none" else 0)
    each = {"kept": residuals if stash else one, "inbox": one, "grads": one, "late": 2 * layers * kept(x._replace(remat="selective"))}
    rings = {name: Ring(said, table.slots[name], each[name]) for name, said in HOLDS.items() if name != "late" or s.splits}
    if stash:
        rings["kept"] = rings["kept"]._replace(holds="what each F leaves for its B")
    said = f"{name}, {x.rows} x {x.seq} tokens of a micro-batch, {x.dtype}"
    return Flight(said, layers, rings, 0 if stash else again)


def fits(c: Any, stages: int, chunks: int) -> None:
    """Refuses more parts than a model has layers."""
    if stages * chunks > c.layers:
        parts = f"{stages} stages of {chunks} chunks take {stages * chunks}" if chunks > 1 else f"{stages} stages take {stages}"
        most = c.layers // chunks
        raise ValueError(
            f"The model has {c.layers} layers, and {parts}: each part has one at least. "
            + (f"Use {most} stage{'s' * (most > 1)} at most" if most else f"Use {c.layers} chunks at most")
            + (", or a schedule with fewer chunks." if chunks > 1 else ", or a deeper model.")
        )
