import struct
import zlib

from meshloom.data.corpus.make import ACT, SCENE, character_vectors, cut

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
