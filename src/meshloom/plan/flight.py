"""Bytes of what a pipeline has in flight: the ring buffers of a schedule, filled with one model's activations.  By shapes; allocates nothing."""

from meshloom.parallel.base import Shapes
from meshloom.parallel.slots import Table
from meshloom.plan.layer import kept
from meshloom.plan.memory import residuals as all_kept
from meshloom.plan.timeline import Flight, Ring

HOLDS = {
    "kept": "inputs, from F to B",
    "inbox": "activations that have arrived",
    "grads": "gradients that have arrived",
    "late": "what B leaves for W",
}
"""Ring buffer -> what it holds."""


def flight(table: Table, x: Shapes, layers: int, name: str, stash: bool = False) -> Flight:
    """What a schedule holds of a model.  x: one micro-batch on one device of a stage.  layers: of a chunk, with slots that none fills.  name: the
    model's.  stash: whether F keeps what the backward needs, not its input alone.

    What W needs is the inputs of products with weights and the gradients of their results: about twice the results, an estimate."""
    s = table.schedule
    one, residuals = kept(x._replace(remat="full")), layers * all_kept(x) * x.parts // x.layers
    each = {"kept": residuals if stash else one, "inbox": one, "grads": one, "late": 2 * layers * kept(x._replace(remat="selective"))}
    rings = {name: Ring(said, table.sizes[name], each[name]) for name, said in HOLDS.items() if name != "late" or s.splits}
    if stash:
        rings["kept"] = rings["kept"]._replace(holds="what each F leaves for its B")
    said = f"{name}, {x.rows} x {x.seq} tokens of a micro-batch, {x.dtype}"
    return Flight(said, layers, rings, residuals)
