"""What the time of a run's step is by formula, where the devices are known: a line of `--dry-run`."""

from meshloom.plan.cost import shapes
from meshloom.plan.flops import train_flops
from meshloom.plan.hardware import Cluster
from meshloom.plan.time import Time, step_time
from meshloom.recipes.run import RunConfig

NAMED = 4
"""Parts that are named, the largest."""


def line(config: RunConfig, chosen, cluster: Cluster) -> str:
    """One line: seconds, tokens a second, MFU and the largest parts, of a recipe's plan (launch.Chosen) on a cluster; or why there is none."""
    model, c, plan, seq = chosen.model, chosen.config, chosen.plan, config.data.seq
    x = shapes(model, c, plan.layout, seq, config.batch.sequences, plan.micro, plan.how, plan.dtype, plan.packed)
    try:
        told = step_time(model, chosen.spelling, x, cluster)
    except ValueError as error:
        return f"time       not known: {error}"
    tokens = config.batch.sequences * seq
    mfu = told.mfu(tokens * train_flops(model, c, seq), cluster)
    parts = ", ".join(f"{what} {share:.0%}" for what, share in shares(told)[:NAMED])
    return f"time       {told.total:.3g} s a step by formula on {cluster.label}, {tokens / told.total:,.0f} tokens a second, MFU {mfu:.0%}: {parts}"


def shares(told: Time) -> list[tuple[str, float]]:
    """Parts of the step by what they are, largest first."""
    found: dict[str, float] = {}
    for part in told.parts:
        found[part.what] = found.get(part.what, 0.0) + part.seconds / told.total
    return sorted(((what, share) for what, share in found.items() if share >= 0.005), key=lambda row: -row[1])
