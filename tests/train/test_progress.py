"""The display's rates."""

import time

from meshloom.train.metrics import Line
from meshloom.train.progress import Progress, duration

LINE = Line(step=4, loss=2.0, accuracy=0.5, tokens=80, norm=1.0, lr=0.1, scale=1.0, skipped=0)


def test_rate_counts_scored_tokens_and_steps(capsys):
    """Tokens a second are those that were scored; MFU is the time that the steps' positions take at the peak, by the time they took."""
    progress = Progress(steps=10, start=0, share=1e-3, positions=20)
    for done in (1, 2, 3, 4):
        progress.step(done, waited=0.01)
    time.sleep(0.1)
    rate = progress.rate(LINE.tokens, 4, 4)
    assert rate.seconds >= 0.1
    assert abs(rate.tokens * rate.seconds - 80) < 1e-6
    assert rate.mfu is not None and abs(rate.mfu * rate.seconds - 4 * 20 * 1e-3) < 1e-9
    assert abs(rate.waiting * rate.seconds - 0.04) < 1e-9
    progress.line(LINE, rate)
    assert "4/10" in capsys.readouterr().out
    assert progress.rate(80, 4, 4) == rate, "no step since: the speed before"
    progress.step(5, waited=0.0)
    assert progress.rate(20, 5, 1).waiting == 0, "each rate begins anew"


def test_rate_counts_only_the_steps_that_its_clock_saw():
    """A save in the middle of an interval starts the clock anew; the last line of a run comes when no further step has been sent."""
    progress = Progress(steps=8, start=0, share=1e-3, positions=20)
    for done in (1, 2, 3, 4, 5):  # the line of step 4 is read when step 5 has been sent
        progress.step(done, waited=0.0)
    progress.rate(80, 4, 4)
    for done in (6, 7, 8):
        progress.step(done, waited=0.0)
        if done == 6:
            progress.restart()
    time.sleep(0.02)
    rate = progress.rate(80, 8, 4)
    assert rate.mfu is not None and abs(rate.mfu * rate.seconds - 2 * 20 * 1e-3) < 1e-9
    assert abs(rate.tokens * rate.seconds - 40) < 1e-6


def test_unknown_peak_says_nothing_about_mfu(capsys):
    progress = Progress(10, 0, None, 20)
    progress.step(1, 0.0)
    rate = progress.rate(20, 1, 1)
    progress.line(LINE, rate)
    assert rate.mfu is None and "MFU" not in capsys.readouterr().out


def test_other_processes_are_silent(capsys):
    progress = Progress(10, 0, None, 20, show=False)
    progress.say("x")
    progress.line(LINE, progress.rate(1, 1, 1))
    assert capsys.readouterr().out == ""


def test_duration_rounds_down_minutes():
    assert [duration(s) for s in (0, 59.4, 100, 3599.6, 3723)] == ["0:00", "0:59", "1:40", "1:00:00", "1:02:03"]
