"""The commands. Each is thin: it reads its flags, starts the process, and calls one worker, imported only then, so that --help is quick."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from meshloom import __version__, cli_base, cli_data, cli_plan
from meshloom.cli_base import DISAGREES, MISTAKE, OK, Common, Machine

app = App(
    name="meshloom",
    version=__version__,
    help="Train, fine-tune, evaluate and run language models on any mesh of devices.",
    help_format="plaintext",  # the default loads a Markdown parser
    suppress_keyboard_interrupt=False,
    help_epilogue="Exit code: 0 done; 1 a check found a difference; 2 a mistake in the input; 70 a bug; "
    "75 stopped by a signal, with a checkpoint; 128 + signal: without.",
)
app.command(cli_data.app)
app.command(cli_plan.calibrate)
app.command(cli_plan.plan)
Sets = Annotated[tuple[str, ...], Parameter(name="--set", negative="")]
Flag = Annotated[bool, Parameter(negative="")]


def main(argv: list[str] | None = None) -> int:
    """Runs one command.  argv: without the program's name; the process's own by default.  Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def command() -> int | None:
        try:
            return app(words, exit_on_error=False, result_action="return_value")
        except CycloptsError:
            return MISTAKE  # already told, with the nearest name

    return cli_base.guarded(command, "--debug" in words)


@app.command
def train(
    recipe: str,
    /,
    *,
    set_: Sets = (),
    out: Path | None = None,
    resume: Flag = False,
    dry_run: Flag = False,
    plan: Path | None = None,
    machine: Machine = Machine(),
) -> int:
    """Train a model.

    Parameters
    ----------
    recipe
        A shipped recipe (see: meshloom info), a YAML file, or the folder of an earlier run.
    set_
        Override one setting, like --set train.steps=100. May be repeated; later ones win.
    out
        The run's folder; runs/NAME by default, then runs/NAME-2 and so on.
    resume
        Go on from the newest checkpoint in the folder.
    dry_run
        Print the plan (shapes, layout, bytes per device, FLOPs per step) and allocate nothing.
    plan
        Layout, micro-batches, remat and runner from this file, which meshloom plan --save wrote; --set wins over it.
    """
    world = cli_base.start(machine)
    from meshloom.recipes import folder, launch
    from meshloom.recipes.load import load_recipe
    from meshloom.train import preempt

    config = cli_plan.taken(recipe, set_, plan) if plan else load_recipe(recipe, set_)
    if dry_run:
        print("\n".join(launch.describe_plan(config, launch.choose(config))))
        return OK
    place = out or folder.place(recipe, config.name, resume, world)
    outcome = launch.train(config, place, resume=resume)
    return preempt.exit_code(outcome.signal, outcome.step)


@app.command(name="eval")
def evaluate(
    run: str,
    /,
    *,
    data: tuple[str, ...] = (),
    step: int | None = None,
    sequences: int = 8,
    limit: int = 0,
    seq: int = 0,
    layout: str = "auto",
    json: Flag = False,
    machine: Machine = Machine(),
) -> int:
    """Measure loss, perplexity and bits per byte.

    Parameters
    ----------
    run
        The folder of a run, or of a Hugging Face model.
    data
        Text, JSONL or Parquet files, folders, or token stores; the run's held-out split by default. May be repeated.
    step
        Which checkpoint of the run; the newest by default.
    sequences
        Sequences scored at once. It does not change the result.
    limit
        Sequences scored in all; 0 scores every one.
    seq
        Tokens in a sequence; 0 takes what the model was trained with. The result depends on it.
    layout
        How the work is spread over devices.
    json
        Print one JSON object.
    """
    cli_base.start(machine)
    from meshloom.recipes import evaluate as worker

    scores = worker.evaluate(run, data, step=step, sequences=sequences, limit=limit, layout=layout, seq=seq)
    worker.show(scores, json=json)
    return OK


@app.command
def generate(
    model: str,
    /,
    *,
    prompt: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, negative="")] = (),
    prompt_file: Path | None = None,
    tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    min_tokens: int = 0,
    stop: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, negative="")] = (),
    ignore_end: Flag = False,
    seed: int = 0,
    step: int | None = None,
    layout: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    json: Flag = False,
    machine: Machine = Machine(),
) -> int:
    """Write text from prompts.

    Parameters
    ----------
    model
        The folder of a run or of a Hugging Face model, or a GGUF file.
    prompt
        What the text begins with. May be repeated: all are written together.
    prompt_file
        A file with one prompt a line.
    tokens
        New tokens for each prompt, at most.
    temperature
        0 always takes the likeliest token.
    top_k
        Draw from the k likeliest tokens only; 0 draws from all.
    top_p
        Draw from the likeliest tokens whose probabilities reach p.
    repetition_penalty
        More than 1 makes tokens that are there already less likely.
    min_tokens
        No end before so many new tokens.
    stop
        End where this text appears. May be repeated.
    ignore_end
        Go on past the end token.
    seed
        Decides the draws.
    step
        Which checkpoint of a run; the newest by default.
    layout
        How the model is spread over devices.
    precision
        The type that is computed in.
    json
        Print one JSON object a prompt.
    """
    cli_base.start(machine)
    from meshloom.core.config import load
    from meshloom.core.files import read_lines
    from meshloom.serve import generate as worker
    from meshloom.serve.sampling import Sampling

    prompts = (*prompt, *(read_lines(prompt_file) if prompt_file else ()))
    if not prompts:
        raise ValueError("There is nothing to begin with. Give --prompt TEXT or --prompt-file FILE.")
    wishes = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty, "tokens": tokens,
        "min_tokens": min_tokens, "stop": stop, "ignore_end": ignore_end, "seed": seed,
    }  # fmt: skip
    sampling = load(Sampling, wishes)
    if len(prompts) == 1 and not json:
        worker.stream(model, prompts[0], sampling, step=step, layout=layout, precision=precision)
    else:
        texts = worker.generate_text(model, prompts, sampling, step=step, layout=layout, precision=precision)
        worker.show(prompts, texts, json=json)
    return OK


@app.command
def convert(
    source: str,
    target: Path,
    /,
    *,
    to: Literal["hf", "meshloom"] = "hf",
    step: int | None = None,
    old_config: Flag = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    overwrite: Flag = False,
    check: Flag = False,
    experts: int = 0,
    top: int = 2,
    machine: Machine = Machine(),
) -> int:
    """Turn a run into a Hugging Face folder, or a Hugging Face folder or GGUF file into a Meshloom checkpoint.

    Parameters
    ----------
    source
        The folder of a run or of a Hugging Face model, or a GGUF file.
    target
        The folder to write. It must be new or empty.
    to
        The format to write.
    step
        Which checkpoint of a run; the newest by default.
    old_config
        Write config.json as transformers before version 5 spells it.
    dtype
        The type to store; the source's by default.
    overwrite
        Replace what is in the target folder.
    check
        Read the result again and compare every tensor, bit for bit.
    experts
        Make a dense model a mixture of so many experts, each a copy of its MLP.
    top
        Experts that a token of such a mixture goes to.
    """
    cli_base.start(machine)
    from meshloom.recipes import convert as worker

    how = {"step": step, "old_config": old_config, "dtype": dtype, "overwrite": overwrite, "check": check, "experts": experts, "top": top}
    return OK if worker.convert(source, target, to, **how) else DISAGREES


@app.command
def verify(
    recipe: str,
    /,
    *,
    layouts: tuple[str, ...] = (),
    steps: int = 5,
    set_: Sets = (),
    machine: Machine = Machine(),
) -> int:
    """Prove that layouts agree with one device: loss, gradients, stored bytes and collectives, on a shrunken copy of the model.

    Parameters
    ----------
    recipe
        A shipped recipe, a YAML file, or the folder of a run.
    layouts
        Layouts to check, like --layouts "zero3=4 tensor=2". May be repeated; a standard set by default.
    steps
        Optimizer steps to compare.
    set_
        Override one setting. May be repeated.
    """
    cli_base.start(machine, devices=8)
    from meshloom.recipes import verify as worker
    from meshloom.recipes.load import load_recipe

    return OK if worker.verify(load_recipe(recipe, set_), layouts, steps=steps) else DISAGREES


@app.command
def layout(
    recipe: str,
    /,
    *,
    layout: str | None = None,
    out: Path | None = None,
    device: int = 0,
    devices: int = 8,
    platform: Literal["cpu", "gpu", "tpu"] = "gpu",
    set_: Sets = (),
    common: Common = Common(),
) -> int:
    """Draw a layout: the mesh, what each device holds of every kind of array, what a layer moves. Allocates nothing and needs no devices.

    Parameters
    ----------
    recipe
        A shipped recipe, a YAML file, or the folder of a run.
    layout
        The layout to draw, like --layout "zero3=4 tensor=2"; the recipe's by default.
    out
        Write the picture to this file too: .svg or .png.
    device
        Whose part is marked, counted from 0.
    devices
        How many there are for a recipe that leaves the layout open (auto).
    platform
        For whose compiler: on a CPU, unrolled layers gather their weights once for both passes.
    set_
        Override one setting. May be repeated.
    """
    from meshloom.recipes import layout as worker
    from meshloom.recipes.load import load_recipe

    worker.show(load_recipe(recipe, set_), layout, out, device=device, devices=devices, platform=platform)
    return OK


@app.command
def schedule(
    *,
    stages: int | None = None,
    micro: int | None = None,
    schedule: str | None = None,
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    table: Path | None = None,
    model: str | None = None,
    set_: Sets = (),
    stash: Flag = False,
    svg: Path | None = None,
    png: Path | None = None,
    csv: Path | None = None,
    common: Common = Common(),
) -> int:
    """Draw a pipeline's schedule: what each stage does when, how long it stands idle, what it holds. Without --schedule: all side by side.

    Parameters
    ----------
    stages
        Parts of the model that work at the same time, each on devices of its own.
    micro
        Micro-batches of a step; the recipe's where --model is given.
    schedule
        gpipe, 1f1b, interleaved2 (or another number of chunks of layers on a stage) or zb.
    all_
        All schedules side by side as well.
    table
        A schedule of your own: a CSV file, a row a stage, a cell a tick, such as F3 or F4+B0.
    model
        A recipe whose activations are counted in bytes.
    set_
        Override one setting of the recipe. May be repeated.
    stash
        Each stage keeps what its backward needs, rather than inputs from which it computes that again.
    svg
        Write the picture to this .svg file too.
    png
        Write the picture to this .png file too.
    csv
        Write the table to this file, to start one of your own from.
    """
    from meshloom.recipes import schedule as worker

    config = None
    if model:
        from meshloom.recipes.load import load_recipe

        config = load_recipe(model, set_)
    for flag, path in ((".svg", svg), (".png", png)):
        if path and path.suffix.lower() != flag:
            raise ValueError(f"--{flag[1:]} writes a {flag} file, and {path} ends otherwise. Name it {path.stem}{flag}.")
    pictures = tuple(path for path in (svg, png) if path)
    worker.show(stages, micro, schedule, table, config, stash, pictures, csv, all_)
    return OK


@app.command
def info(*, machine: Machine = Machine()) -> int:
    """Show versions, devices, memory, the compile cache, and what ships: recipes and model families."""
    cli_base.start(machine)
    from meshloom import cli_info

    cli_info.show()
    return OK


app.register_install_completion_command()


if __name__ == "__main__":
    sys.exit(main())
