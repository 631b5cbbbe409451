"""What the benchmark of pipelines compares is right: operations and copies as read from programs, and the gradient that it measures against."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import autodiff
import executed
import pipeline as bench

import programs


def test_products_are_counted_as_often_as_they_run() -> None:
    def five(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]

    text = jax.jit(five).lower(jnp.ones((8, 16)), jnp.ones((16, 16))).compile().as_text()
    assert executed.products(text) == 5 * 2 * 8 * 16 * 16


def test_copies_in_loops_alone_count_and_fillings_do_not() -> None:
    text = """
%body (p: (f32[7,8])) -> (f32[7,8]) {
  %p = (f32[7,8]{1,0}) parameter(0)
  %ring = f32[7,8]{1,0} get-tuple-element(%p), index=0
  %zero = f32[7,8]{1,0} broadcast(%c), dimensions={}
  %copy.1 = f32[7,8]{1,0} copy(%ring), metadata={op_name="while/body"}
  %copy.2 = f32[7,8]{1,0} copy(%zero)
  ROOT %t = (f32[7,8]{1,0}) tuple(%copy.1)
}

ENTRY %main (a: f32[7,8]) -> f32[7,8] {
  %a = f32[7,8]{1,0} parameter(0)
  %copy.3 = f32[7,8]{1,0} copy(%a)
  %start = (f32[7,8]{1,0}) tuple(%copy.3)
  ROOT %loop = (f32[7,8]{1,0}) while(%start), condition=%until, body=%body
}
"""
    assert executed.copies(text, 7 * 8 * 4) == [("f32[7,8]", 1)] and executed.copies(text, 7 * 8 * 4 + 1) == []


def test_the_gradient_by_differentiation_is_the_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    one = programs.gradient("llama", "", 2)
    monkeypatch.setattr(programs, "make_gradient", autodiff.make_gradient)
    programs.same(programs.gradient.__wrapped__("llama", "pipe=2", 2), one)


def test_a_step_executes_what_the_simulator_says() -> None:
    """To the operation: ticks of F and of B, each a stage's layers; the head once for each micro-batch."""
    given = bench.parser().parse_args(["--what", "work"])
    given.dtype, small = "float32", {**bench.SMALL, "embed": 32, "ffn": 64, "vocab": 256}
    count = lambda name, **more: executed.products(
        bench.lowered(name, bench.job(name, 4, given, **small, **more), jax.devices()).compile(compiler_options=programs.QUICK).as_text()
    )
    some, more = count("data=2"), count("data=2", layers=16)
    unit, head = (more - some) / 4 / 12, (2 * some - more) / 4 / 4
    assert count("1f1b") == pytest.approx(bench.predicted("1f1b", 4, unit, head), rel=1e-3)
