import gzip
import json
import os
import struct
import zlib

import pytest
import zstandard

from meshloom.data.config import Source
from meshloom.data.corpus.make import ACT, SCENE, character_vectors, cut
from meshloom.data.report import Report
from meshloom.data.sources import documents, files_of

pa = pytest.importorskip("pyarrow")
TEXTS = ["first", "zweites ä", "third\nwith a line"]
JSONL = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()


def texts(path, on_bad="stop", report=None, max_bytes=10**6, **source):
    return [d.text for d in documents([Source(path=str(path), **source)], on_bad, max_bytes, report or Report())]


def write_parquet(path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"id": [1, 2, 3], "text": TEXTS}), path, row_group_size=2)


def write_datasets(path):
    """What Dataset.save_to_disk writes."""
    path.mkdir()
    for i, some in enumerate((TEXTS[:2], TEXTS[2:])):
        table = pa.table({"text": some})
        with pa.OSFile(str(path / f"data-{i:05d}-of-00002.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"data-{i:05d}-of-00002.arrow"} for i in range(2)]}))
    (path / "dataset_info.json").write_text("{}")


def frames(raw):
    """Zstandard of two frames, as `zstd` of several files gives."""
    return zstandard.compress(raw[:20]) + zstandard.compress(raw[20:])


MAKERS = {
    "a.jsonl": lambda p: p.write_bytes(JSONL),
    "a.ndjson": lambda p: p.write_bytes(JSONL),
    "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress(JSONL)),
    "b.jsonl.gz": lambda p: p.write_bytes(gzip.compress(JSONL[:20]) + gzip.compress(JSONL[20:])),
    "a.jsonl.zst": lambda p: p.write_bytes(zstandard.compress(JSONL)),
    "b.jsonl.zst": lambda p: p.write_bytes(frames(JSONL)),
    "a.parquet": write_parquet,
    "saved": write_datasets,
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_format_gives_the_same_documents(tmp_path, name):
    MAKERS[name](tmp_path / name)
    assert texts(tmp_path / name) == TEXTS


def test_saved_by_the_library_itself(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS, "n": [1, 2, 3]}).save_to_disk(str(tmp_path / "d"))
    assert texts(tmp_path / "d") == TEXTS


def test_a_folder_is_read_by_name_and_says_what_it_leaves_out(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("text")
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(JSONL))
    for name in ("README.md", "picture.png", ".hidden.txt"):
        (tmp_path / name).write_text("no")
    report = Report()
    assert texts(tmp_path, report=report) == [*TEXTS, "text"]
    assert report.other_files == ["README.md", "picture.png"]
    assert "2 files of other kinds left out: README.md, picture.png" in "\n".join(report.lines())


def test_several_sources_one_after_another(tmp_path):
    for name in ("x", "y"):
        (tmp_path / f"{name}.txt").write_text(name)
    found = documents([Source(path=str(tmp_path / f"{n}.txt")) for n in ("y", "x")], "stop", 100, Report())
    assert [d.text for d in found] == ["y", "x"]


def test_stop_says_file_line_kind_and_what_to_do(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSONL + b'{"text": 5}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:4: wrong type: .*'text' is int.*set data\.on_bad to skip"):
        texts(tmp_path / "a.jsonl")


def test_skip_counts_by_kind(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{\n" + JSONL + b'{"text": 5}\n{"text": ""}\n[]\n{}\n\xff\n')
    report = Report()
    assert texts(tmp_path / "a.jsonl", "skip", report) == TEXTS
    assert report.bad == {"broken JSON": 1, "wrong type": 1, "empty": 1, "not an object": 1, "missing field": 1, "not UTF-8": 1}
    assert report.places["missing field"] == [f"{tmp_path}/a.jsonl:8 no 'text'; its keys:"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_breaks_off_is_damaged(tmp_path, name):
    MAKERS[name](tmp_path / name)
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) - 12])
    with pytest.raises(ValueError, match="damaged file"):
        texts(tmp_path / name)
    report = Report()
    (tmp_path / "z.txt").write_text("more")
    assert texts(tmp_path, "skip", report)[-1] == "more" and report.bad["damaged file"] == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_a_file_of_another_kind_is_damaged(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is nothing of the kind, really not")
    with pytest.raises(ValueError, match="damaged file"):
        texts(tmp_path / name)


@pytest.mark.parametrize(
    "path, said",
    [
        ("nothing.jsonl", r"There is no file or folder .*nothing\.jsonl\."),
        ("a.jsonk", r"Did you mean .*a\.jsonl\?"),
        ("odd.bin", r"How should .*odd\.bin be read\?.*Set the source's format"),
        ("empty", "holds no file that ends in .*It holds 0 other files"),
        ("empty.jsonl", "has no documents"),
        ("bad.jsonl", r"has no documents\. 2 empty"),
        ("dict", r"holds several data sets: train, test\. Give the path of one, such as .*dict/train"),
    ],
)
def test_missing_and_empty(tmp_path, path, said):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "odd.bin").write_bytes(b"x")
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": ""}\n' * 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=said):
        texts(tmp_path / path, "skip")


def test_a_table_without_the_column(tmp_path):
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no column 'body'\. Its columns: id, text\."):
        texts(tmp_path / "a.parquet", field="body")


def test_a_table_with_empty_and_wrong_cells(tmp_path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"text": ["a", None, "", "b"], "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    report = Report()
    assert texts(tmp_path / "a.parquet", "skip", report) == ["a", "b"]
    assert report.bad == {"missing field": 1, "empty": 1} and report.places["empty"] == [f"{tmp_path}/a.parquet:3"]
    report = Report()
    with pytest.raises(ValueError, match="4 wrong type"):
        texts(tmp_path / "a.parquet", "skip", report, field="n")


def test_the_shipped_corpus():
    report = Report()
    found = texts("corpus", report=report)
    assert (len(found), report.other_files) == (1230, []) and sum(map(len, found)) == report.characters == 9_098_490
    assert [p.name for p in files_of(Source(path="corpus"))] == ["austen.jsonl.zst", "shakespeare.jsonl.zst"]
    assert not any("gutenberg" in t.lower() for t in found)


PLAY = """HAMLET

by William Shakespeare

PERSONS REPRESENTED: a long enough list of persons to be kept as a document.

ACT I.

Scene I. Elsinore. A platform.

Who's there? Nay, answer me: stand, and unfold yourself. Long live the king!

ACT II.

SCENE 2. A room.

My lord, I have some sport in hand wherein your cunning can assist me much.

EPILOGUE.

If we shadows have offended, think but this, and all is mended, that you.
"""


def test_a_play_is_cut_by_scene_under_its_act():
    found = list(cut(PLAY.splitlines(), SCENE, "Hamlet", ACT))
    titles = [t for t, _ in found]
    assert titles == [
        "Hamlet",
        "Hamlet, ACT I, Scene I. Elsinore. A platform",
        "Hamlet, ACT II, SCENE 2. A room",
        "Hamlet, ACT II, EPILOGUE",
    ]
    assert all(text.startswith(f"{title}\n\n") and text.endswith("\n") for title, text in found)
    assert "Nay, answer me" in found[1][1] and "sport in hand" not in found[1][1]


def test_r_data_is_read(tmp_path):
    def vector(strings):
        head = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
        body = struct.pack(">ii", 16, len(strings)) + b"".join(struct.pack(">ii", 0x40009, len(s)) + s for s in strings)
        return struct.pack(">I", len(head + body)) + zlib.compress(head + body)

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "Rdata.rdb").write_bytes(vector([b"EMMA", b"", "é".encode()]) + vector([b"two"]))
    assert list(character_vectors(tmp_path)) == [["EMMA", "", "é"], ["two"]]


def test_links_are_followed_once_and_broken_ones_told(tmp_path):
    folder, beside = tmp_path / "data", tmp_path / "beside"
    folder.mkdir(), beside.mkdir()
    (folder / "a.txt").write_text("a")
    (beside / "b.txt").write_text("b")
    (folder / "sub").symlink_to(beside)
    (folder / "self").symlink_to(folder)
    (beside / "back").symlink_to(folder)
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    report = Report()
    assert texts(folder, report=report) == ["a", "b"]
    assert report.other_files == ["gone.txt"]


def test_what_is_neither_file_nor_folder(tmp_path):
    (tmp_path / "link.txt").symlink_to("link.txt")
    with pytest.raises(ValueError, match=r"link.txt is a link to link.txt, which is not there\. Mend the link"):
        texts(tmp_path / "link.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match="pipe.txt is no regular file, but a pipe or a device"):
        texts(tmp_path / "pipe.txt")


@pytest.mark.parametrize(
    "name, held, said",
    [
        ("state.json", "junk", "state.json is damaged .*Save the data set again"),
        ("state.json", "{}", "state.json is damaged"),
        ("dataset_dict.json", "[]", "dataset_dict.json is damaged"),
        ("dataset_dict.json", '{"splits": []}', "holds several data sets: none. Give the path of one."),
    ],
)
def test_a_damaged_description_of_a_data_set(tmp_path, name, held, said):
    (tmp_path / name).write_text(held)
    with pytest.raises(ValueError, match=said):
        texts(tmp_path)


def test_a_folder_of_another_ending_is_read_where_the_format_is_given(tmp_path):
    """Source code as text: .py has no format of its own, a .jsonl beside it has."""
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "b.jsonl").write_text('{"text": "no"}\n')
    found = list(documents((Source(path=str(tmp_path), format="text"),), "stop", 1 << 20, Report()))
    assert [d.text for d in found] == ["print(1)\n"]
    assert [d.text for d in documents((Source(path=str(tmp_path)),), "stop", 1 << 20, Report())] == ["no"]
