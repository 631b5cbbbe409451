from meshloom.data.report import SHOWN, Bad, Report


def test_counts_by_kind_and_keeps_the_first_places():
    report = Report()
    for i in range(10):
        report.note(Bad("empty", "a.jsonl", i + 1, ""))
    report.note(Bad("broken JSON", "b.jsonl", 7, "Expecting value"))
    assert report.facts()["bad"] == {"empty": 10, "broken JSON": 1}
    assert report.places["empty"] == [f"a.jsonl:{i}" for i in range(1, SHOWN + 1)]
    text = "\n".join(report.lines())
    assert "11 skipped as bad" in text and "10 empty" in text and "b.jsonl:7 Expecting value" in text and text.count("a.jsonl") == SHOWN


def test_nothing_bad_is_said_shortly():
    assert Report().lines() == ["0 documents, 0 characters; 0 skipped as bad"]
