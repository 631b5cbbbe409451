"""Train steps compiled for devices that are not there: for a TPU topology, by the vendor's compiler (libtpu), on any machine; or for simulated CPU
devices.  What `meshloom plan --compile` and the benchmarks share."""

from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.spec import abstract
from meshloom.models.table import MODELS
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.cost import Line, compare, shapes, step_cost
from meshloom.plan.hlo import collectives
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from meshloom.train.gradient import batch_partition, make_gradient
from meshloom.train.schedule import make_schedule
from meshloom.train.step import make_step

APART = {"xla_tpu_enable_async_collective_fusion": False}
"""For counting: else a gather that runs beside several computations stands in the text of each of them."""


class Job(NamedTuple):
    """What is compiled. model: fields of a configuration, `family` among them. sequences: of a step, in `micro` micro-batches."""

    model: dict[str, Any]
    layout: str
    seq: int
    sequences: int
    micro: int = 1
    remat: str = "full"
    dtype: str = "bfloat16"
    platform: str = "tpu"
    runner: str = "scan"


def devices(topology: str) -> list:
    """The devices of a topology such as "v5e:2x4".  Raises ModuleNotFoundError, in a sentence, where libtpu is missing, ValueError for what libtpu does not
    know."""
    if find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "Compiling for TPUs that are not there needs libtpu, which is not installed here: pip install 'meshloom[tpu]' "
            "(Linux on x86; it needs no TPU)."
        )
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:  # libtpu's own, of several types
        raise ValueError(f"libtpu does not know the topology '{topology}': {str(error).splitlines()[0]}") from error


def planned(job: Job, there: list) -> tuple[Any, Any, Plan]:
    """Model, configuration and plan on these devices."""
    model = MODELS[job.model["family"]]
    c = model.Config(**job.model)
    layout = build(job.layout, c, job.seq, job.platform)
    mesh = make_mesh(layout, there) if layout.sizes else Mesh(there[:1], ("one",), axis_types=(AxisType.Auto,))
    return model, c, Plan(mesh, layout, How(job.runner, job.remat), job.micro, job.dtype, packed=False)


def rows(job: Job, plan: Plan) -> Any:
    """A step's batch, abstract."""
    shape = (job.micro, job.sequences // job.micro, job.seq)
    kinds = {"tokens": "int32", "targets": "int32", "weights": "float32", "positions": "int32"}
    where = batch_partition(plan)

    def one(name: str, shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(plan.mesh, getattr(where, name)))

    return type(where)(**{n: one(n, shape, d) for n, d in kinds.items()}, segments=None, samples=one("samples", shape[:2], "int32"))


def lowered(job: Job, there: list) -> Any:
    """The whole train step with AdamW, ready to be compiled."""
    model, c, plan = planned(job, there)
    schedule = make_schedule(ScheduleConfig(kind="constant"), 1e-3, 10)
    made = make_step(model, c, plan, lm(), OptimizerConfig(), schedule, TrainConfig(steps=10), 0, 1)
    return made.run.lower(abstract(made.specs, made.shardings), rows(job, plan))


def step(job: Job, there: list) -> Any:
    """The whole train step with AdamW, compiled."""
    return lowered(job, there).compile()


def compiled(job: Job, there: list) -> Any:
    """The same, compiled so that its collectives can be counted."""
    return lowered(job, there).compile(compiler_options=options(job))


def against_formula(job: Job, there: list, text: str) -> list[Line]:
    """The collectives of a compiled program, and by formula."""
    model, c, plan = planned(job, there)
    formula = step_cost(job.layout, shapes(model, c, plan.layout, job.seq, job.sequences, job.micro, plan.how, job.dtype, plan.packed))
    return compare(collectives(text, plan.layout.sizes), formula)


def options(job: Job) -> dict[str, Any]:
    """Options of the compiler for counting."""
    return APART if job.platform == "tpu" else {}


def traffic(job: Job, there: list) -> list[Line]:
    """The collectives of the program up to the gradient, and by formula."""
    model, c, plan = planned(job, there)
    params = abstract(model.specs(c), shardings(plan.mesh, plan.layout, "rest", model.specs(c)))
    scale = jax.ShapeDtypeStruct((), "float32")
    program = jax.jit(make_gradient(model, c, plan, lm())).lower(params, rows(job, plan), None, scale)
    return against_formula(job, there, program.compile(compiler_options=options(job)).as_text() or "")
