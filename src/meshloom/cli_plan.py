"""The planner's commands. Thin, like those of cli.py, which takes them in."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from meshloom import cli_base
from meshloom.cli_base import DISAGREES, OK, Machine

Flag = Annotated[bool, Parameter(negative="")]


def calibrate(*, out: Path = Path("hardware.yaml"), name: str = "mine", quick: Flag = False, machine: Machine = Machine()) -> int:
    """Measure the present devices (products, memory, collectives) and write them as hardware that the planner takes: --on hardware.yaml.

    Parameters
    ----------
    out
        The file to write.
    name
        What to call this hardware.
    quick
        Fewer sizes, on a CPU: some ten seconds.
    """
    cli_base.start(machine)
    from meshloom.recipes import calibrate as worker

    worker.calibrate(name, out, quick)
    return OK


def plan(
    model: str,
    /,
    *,
    on: str | None = None,
    batch_tokens: str | None = None,
    seq: int | None = None,
    tokens: str | None = None,
    price: float | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    micro: int | None = None,
    remat: Literal["none", "selective", "full", "offload"] | None = None,
    layout: str = "",
    json: Flag = False,
    picture: Path | None = None,
    save: Path | None = None,
    compile: Flag = False,
    exact: Flag = False,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    machine: Machine = Machine(),
) -> int:
    """Find the best layout of a model on a cluster, by the cost model: memory, time, traffic, price, and why others are worse. Needs none of its devices.

    Parameters
    ----------
    model
        A known model (see: meshloom info), a recipe, or a Hugging Face folder.
    on
        The cluster: h100:8x8 (8 nodes of 8), v5p:8x8x8, a100:1x8, cpu:8, a file of your own; the devices present by default.
    batch_tokens
        Tokens of a step; K, M and G are powers of two: 4M is 4,194,304. The recipe's by default, 4M for a model.
    seq
        Tokens of a sequence; the recipe's by default, up to 8192 for a model.
    tokens
        Tokens of the whole run, for days and price; K, M, B and T are powers of ten: 15T.
    price
        Dollars a device-hour.
    precision
        The type of the arithmetic; the recipe's by default, bf16 for a model.
    micro
        Fix the number of micro-batches.
    remat
        Fix what the backward pass computes again.
    layout
        Fix some words of the layout, like --layout "tensor=8 sequence".
    json
        Print one JSON object.
    picture
        Write a picture of memory and time to this file too: .svg or .png.
    save
        Write the plan to this file, for meshloom train RECIPE --plan FILE.
    compile
        Compile the train step for this topology too (TPUs by libtpu, or simulated CPU devices), and print its memory and traffic beside the prediction.
    exact
        Go on until the best is proven, where the search would stop before: with many thousand devices, or many candidates that are nearly equal.
    set_
        Override one setting of the recipe. May be repeated.
    """
    import os

    if compile:  # before JAX starts: libtpu asks nobody what machine this is, and several may compile at once
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    name, _, count = (on or "").partition(":")
    elsewhere = on is not None and name != "cpu"
    devices = int(count) if compile and name == "cpu" and count.isdigit() and 0 < int(count) <= 512 else None
    if elsewhere:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs there
    cli_base.start(machine, devices)
    from meshloom.recipes import plan as worker

    wish = worker.Wish(model, on, batch_tokens, seq, precision, remat, micro, layout, set_, exact)
    want = worker.Wanted(tokens, price, json, picture, save, compile)
    return OK if worker.plan(wish, want) else DISAGREES


def taken(recipe: str, sets: tuple[str, ...], plan: Path) -> Any:
    """A recipe under a plan that was saved; what is to be said of it is said by the first process."""
    import jax

    from meshloom.recipes.saved import planned

    config, said = planned(recipe, sets, plan)
    if jax.process_index() == 0:
        print("\n".join(said))
    return config
