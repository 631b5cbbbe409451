"""The loop around the train step: feed, step, log, and whatever is due. Goes on from a run's folder."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshloom.core.spec import abstract
from meshloom.core.tree import Tree
from meshloom.data.loader import Loader
from meshloom.models.base import Model
from meshloom.models.freeze import frozen_paths
from meshloom.objectives.lm import Objective
from meshloom.plan.flops import train_flops
from meshloom.plan.peak import peak
from meshloom.plan.plan import Plan
from meshloom.train import plot
from meshloom.train.config import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    OptimizerConfig,
    OuterConfig,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
)
from meshloom.train.feed import Feed
from meshloom.train.method import Method, make_step
from meshloom.train.metrics import TIMING, Interval, Line, Metrics
from meshloom.train.preempt import Preemption
from meshloom.train.progress import Progress
from meshloom.train.scale import check_skips
from meshloom.train.schedule import make_schedule
from meshloom.train.score import make_score, score
from meshloom.train.step import State, Step
from meshloom.weights.checkpoint import Checkpoints, check_same


class Run(NamedTuple):
    """Everything that a run is, resolved: nothing is decided later."""

    folder: Path
    seed: int
    model: Model
    config: Any
    plan: Plan
    objective: Objective
    data: Loader
    valid: Loader | None
    steps: int
    batch: BatchConfig
    optimizer: OptimizerConfig
    outer: OuterConfig
    schedule: ScheduleConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    sample: SampleConfig
    log: LogConfig
    facts: dict[str, Any]
    """What every checkpoint says of itself: model, layout, recipe, versions. Plain JSON."""
    weights: Callable[[Tree], Tree] | None
    """shardings -> the parameters to start from; None: random ones."""
    write: Callable[[Tree], list[str]] | None
    """Parameters in the `rest` table -> texts, for the sample hook."""
    begun: Callable[[], None] = lambda: None
    """Called once it is sure that the run begins or goes on. What is refused leaves the folder as it was."""


class Outcome(NamedTuple):
    """How a run ended. step: steps done. signal: what stopped it early, or None. loss: the last validation loss, None where there is none."""

    state: State
    step: int
    signal: int | None
    loss: float | None


def train(run: Run, resume: bool = False) -> Outcome:
    """Trains until run.steps or a signal.  resume: go on from the newest checkpoint of the folder.

    Raises FloatingPointError after too many non-finite steps, OSError where a checkpoint could not be written, ValueError for a resume that
    does not fit. The step's checkpoint is saved before the step's evaluation, so that a failing evaluation loses nothing.
    """
    step = _make_step(run)
    keep = run.checkpoint
    with (
        Preemption(keep.grace) as ask,
        closing(Checkpoints(run.folder / "checkpoints", keep.keep_last, keep.keep_every, keep.keep_best, resume)) as saved,
    ):
        if jax.process_index() == 0:
            print(*saved.said, sep="\n", end="\n" * bool(saved.said))
        state, loader, done, sample, partial = begin(run, step, saved, resume)
        run.begun()
        with Metrics(run.folder, run.log.tensorboard, run.log.every, done) as metrics, _progress(run, done) as progress:
            hooks = Hooks(run, step, saved, metrics, progress, Interval(run.log.every, partial))
            if done:
                hooks.due(state, done)
            first, batches = done, hooks.feed.train(loader, sample)
            while not hooks.over(done) and not ask.stop(done):
                begun = time.perf_counter()
                batch = next(batches)
                progress.step(done + 1, time.perf_counter() - begun)
                state, told = step.at(done)(state, batch)
                done, sample = done + 1, sample + run.batch.sequences
                if done == first + 1:
                    progress.restart(first)
                hooks.log(hooks.interval.push(done, told))
                if run.optimizer.adascale:
                    hooks.log(hooks.interval.read())  # whether this was the last step, its own numbers say
                saved.check()
                if _every(done, run.checkpoint.every):
                    hooks.save(state, loader, done, sample)
                hooks.due(state, done)
            return hooks.end(state, loader, done, sample, ask.signal or None)


def begin(run: Run, step: Step, saved: Checkpoints, resume: bool) -> tuple[State, Loader, int, int, dict[str, dict[str, float]]]:
    """The first state, the data, the steps and the samples done, and an unfinished interval: of a new run, or of the newest checkpoint.

    Samples are counted by themselves, so a resume may have another batch size: the next sample is still the next.
    """
    newest = saved.resumable() if resume else None
    if newest is None:
        if resume and jax.process_index() == 0:
            print(f"There is no checkpoint in {saved.folder} yet: the run begins at step 0.")
        given = None if run.weights is None else run.weights(step.shardings.params)
        return step.start(given), run.data, 0, 0, {}
    if newest > run.steps:
        raise ValueError(
            f"{saved.path(newest)} is of step {newest}, and the run that is asked for ends at step {run.steps}. "
            "Train longer (train.steps), or start a new run in another folder."
        )
    info = saved.info(newest)
    if lost := {"model", "training", "data", "interval"} - set(info):
        raise ValueError(
            f"{saved.path(newest) / 'info.json'} is damaged: it lacks {', '.join(sorted(lost))}. To go on, move that checkpoint away."
        )
    check_same("model", info["model"], run.facts["model"], saved.path(newest))
    check_same("way of training", info["training"], run.facts["training"], saved.path(newest))
    fewer = _newly_frozen(info.get("frozen", []), frozen_paths(step.specs.params), saved.path(newest))
    loader, sample = run.data.resume(info["data"])
    state = saved.restore(abstract(step.specs, step.shardings), newest, part=bool(fewer))
    return state, loader, newest, sample, info["interval"]


def _newly_frozen(before: Sequence[str], now: Sequence[str], path: Path) -> list[str]:
    """The parameters that trained up to a checkpoint and are frozen now: what the optimizer kept of them is left behind, and this is said.
    Raises ValueError where one is to train that was frozen: the optimizer knows nothing of it, and counts its steps for all together."""
    if begun := sorted({*before} - {*now}):
        raise ValueError(
            f"{path} was made with {', '.join(begun)} frozen, so it holds no optimizer state to train {'them' if len(begun) > 1 else 'it'} with. "
            "Set train.freeze back to resume it, or start a new run from its weights (model: {from: the hf folder of the run})."
        )
    fewer = sorted({*now} - {*before})
    if fewer and jax.process_index() == 0:
        print(f"Frozen from here on: {', '.join(fewer)}. What the optimizer kept of them up to {path} is left behind.")
    return fewer


class Hooks:
    """What happens between steps, and what it needs."""

    def __init__(self, run: Run, step: Step, saved: Checkpoints, metrics: Metrics, progress: Progress, interval: Interval):
        self.run, self.step, self.saved, self.metrics, self.progress, self.interval = run, step, saved, metrics, progress, interval
        self.feed = Feed(run.plan, run.batch.sequences, run.data.how.seq)
        self.judge = make_score(run.model, run.config, run.plan)
        self.held = Feed(run.plan, run.plan.layout.even(run.eval.sequences), run.data.how.seq, micro=1)
        self.loss: float | None = None
        self.saved_at = 0

    def log(self, line: Line | None) -> None:
        """Writes and shows an interval; ends the run where too many steps were not finite."""
        if self.interval.last:
            last = self.interval.last
            check_skips(self.run.train.nonfinite_limit, int(last["consecutive"]), self.progress.done, last["scale"])
        if line is None:
            return
        rate = self.progress.rate(line.tokens, line.step, (line.step - 1) % self.interval.every + 1)
        self.metrics.write(line.tree())
        self.metrics.write({"step": line.step, **rate._asdict()}, TIMING)
        self.progress.line(line, rate)

    def save(self, state: State, loader: Loader, done: int, sample: int) -> None:
        """Sends a checkpoint on its way, with all that an exact resume needs."""
        self.log(self.interval.read())
        info = {**self.run.facts, "data": loader.state(sample), "interval": self.interval.state}
        self.saved.save(done, state, info)
        self.saved_at = done
        self.progress.restart()

    def over(self, done: int) -> bool:
        """Whether the run is at its end: all steps are done, or the sum of their gains has come to as many."""
        return done >= self.run.steps or self.interval.last.get("scaled_steps", 0.0) >= self.run.steps

    def due(self, state: State, done: int) -> None:
        """Validation and text, where their step has come."""
        if self.over(done):
            return  # `end` does both
        if self.run.valid is not None and _every(done, self.run.eval.every):
            self.validate(state, done)
        if self.run.write is not None and _every(done, self.run.sample.every):
            self.show(state, done)

    def validate(self, state: State, done: int) -> None:
        """The loss on the held-out set: its first eval.batches batches, or all of it."""
        self.log(self.interval.read())
        rows = self.run.eval.batches * self.run.eval.sequences
        got = score(self.judge, state.params, self.held.once(self.run.valid, rows))
        self.loss = got.loss
        values = {
            "kind": "valid",
            "step": done,
            "loss": got.loss,
            "perplexity": got.perplexity,
            "accuracy": got.accuracy,
            "tokens": int(got.tokens),
        }
        self.metrics.write(values)
        self.progress.say(
            f"step {done:>6,}  validation loss {got.loss:.4f}  perplexity {got.perplexity:.2f}  over {int(got.tokens):,} tokens"
        )
        self.saved.score(done, got.loss)
        self.progress.restart()

    def show(self, state: State, done: int) -> None:
        """What the model writes now."""
        self.log(self.interval.read())
        assert self.run.write is not None
        for prompt, text in zip(self.run.sample.prompts, self.run.write(state.params)):
            self.metrics.write({"kind": "sample", "step": done, "prompt": prompt, "text": text})
            self.progress.say(f"step {done:>6,}  {prompt}{text}")
        self.progress.restart()

    def end(self, state: State, loader: Loader, done: int, sample: int, signal: int | None) -> Outcome:
        """The last checkpoint, on disk; then, unless a signal hurries, the last validation and text."""
        self.log(self.interval.read())
        if self.saved_at != done and done:
            self.save(state, loader, done, sample)
        self.saved.wait()
        if self.over(done):
            self.log(self.interval.rest(done))
        if signal is None:
            if self.run.valid is not None:
                self.validate(state, done)
            if self.run.write is not None:
                self.show(state, done)
        if self.run.log.plot and self.metrics.writes:
            plot.draw(self.run.folder)
        return Outcome(state, done, signal, self.loss)


def _every(done: int, every: int) -> bool:
    return bool(every) and done % every == 0


def _make_step(run: Run) -> Step:
    """The step's program, with the schedule in its unit."""
    per_step = {"steps": 1, "tokens": run.batch.sequences * run.data.how.seq}[run.schedule.unit]
    schedule = make_schedule(run.schedule, run.optimizer.lr, per_step * run.steps)
    method = Method(run.optimizer, run.outer, run.train, run.steps)
    return make_step(method, run.model, run.config, run.plan, run.objective, schedule, run.seed, per_step)


def _progress(run: Run, done: int) -> Progress:
    """The display, with the part of a second that one position takes at the devices' peak."""
    best = peak(run.train.precision)
    share = None if best is None else train_flops(run.model, run.config, run.data.how.seq) / (best * run.plan.mesh.size)
    return Progress(run.steps, done, share, run.batch.sequences * run.data.how.seq, show=jax.process_index() == 0)
