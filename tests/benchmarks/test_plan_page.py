"""The page of the planner: its outputs are those of its commands, as far as they do not depend on a figure."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_page  # noqa: E402


def test_a_block_is_renewed_and_all_else_stays(monkeypatch) -> None:
    monkeypatch.setattr(plan_page, "output", lambda command: f"<{command}>\n")
    text = "a\n```console\n$ meshloom plan x\nold\nold\n```\nb\n```console\n$ meshloom plan y --compile\nold\n```\n"
    assert plan_page.renewed(text, "plan x") == text.replace("old\nold", "<meshloom plan x>")


def test_the_page_shows_what_the_planner_tells() -> None:
    """Head, sections and the count of candidates; the figures are renewed by the command."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```console\n(.*?)```", page, re.DOTALL) if "llama3-70b" in b)
    for said in (
        "llama3-70b on h100:8x8: 64 devices",
        "= 4,194,304",
        "Layout  ",
        "Memory  ",
        "Step  ",
        "Speed  ",
        "Budget  ",
        "Next best",
        "candidates: ",
    ):
        assert said in block
    assert len(re.findall(r"^  \d\. ", block, re.MULTILINE)) == 5
