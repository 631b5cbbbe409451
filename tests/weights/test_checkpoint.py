"""Checkpoints: bit-equal under other layouts, whole or not counted, kept by number, and refusals that name what is wrong."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.core.tree import named_leaves
from meshloom.weights.checkpoint import Checkpoints, check_same, differences, kept, load
from meshloom.weights.stored import check_files, read_info, whole

INFO = {"model": {"layers": 2}, "data": {"sample": 96}, "layout": "zero3=8"}


def mesh(*sizes):
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("a", "b")[: len(sizes)])


def values():
    draw = np.random.default_rng(0).standard_normal
    return {
        "params": {"w": draw((8, 16)).astype(np.float32), "gain": draw(8).astype(np.float32)},
        "opt": {"mu": {"w": draw((8, 16)).astype(np.float32)}, "count": np.int32(7)},
    }


def place(tree, where):
    """The tree on a mesh, with w split as told."""
    leaves = [
        jax.device_put(x, NamedSharding(where[0], where[1] if n.endswith("w") else PartitionSpec())) for n, x in named_leaves(tree).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def abstract(tree):
    """Shapes, types and places of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree)


def same_bits(a, b):
    return all(np.asarray(x).tobytes() == np.asarray(named_leaves(b)[n]).tobytes() for n, x in named_leaves(a).items())


def save(folder, *steps, tree=None, **keep):
    with_scores = keep.pop("scores", {})
    checkpoints = Checkpoints(folder, **keep)
    for step in steps:
        checkpoints.save(step, tree or place(values(), SHARDED), INFO)
        if step in with_scores:
            checkpoints.score(step, with_scores[step])
    checkpoints.wait()
    return checkpoints


SHARDED = (mesh(8), PartitionSpec("a"))
OTHERS = {
    "4 x 2 devices, both axes": (mesh(4, 2), PartitionSpec("b", "a")),
    "2 devices": (mesh(2), PartitionSpec(None, "a")),
    "1 device": (mesh(1), PartitionSpec()),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint of step 3, sharded over 8 devices; tests must not change it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 3).close()
    return folder / "3"


@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_is_bit_equal(saved, name):
    wanted = place(values(), OTHERS[name])
    got = load(saved, abstract(wanted))
    assert same_bits(got, values())
    assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)))


def test_one_device_process_lists_and_loads(saved):
    """C29: a process that has one device reads what eight wrote; listing it needs no JAX at all."""
    code = f"""
        import json, sys
        info = json.load(open({str(saved / "info.json")!r}))
        assert info["step"] == 3 and info["model"] == {{"layers": 2}} and info["arrays"]["params.w"]["shape"] == [8, 16]
        import jax, numpy as np
        from meshloom.weights.checkpoint import Checkpoints
        assert jax.device_count() == 1
        checkpoints = Checkpoints({str(saved.parent)!r})
        assert checkpoints.latest() == 3
        shape = lambda *s: jax.ShapeDtypeStruct(s, "float32")
        got = checkpoints.restore({{"params": {{"w": shape(8, 16), "gain": shape(8)}}}}, part=True)
        np.save({str(saved.parent / "w.npy")!r}, got["params"]["w"])
    """
    run_python(code, env={"XLA_FLAGS": ""})
    assert np.load(saved.parent / "w.npy").tobytes() == values()["params"]["w"].tobytes()


def test_donation_right_after_save(tmp_path):
    """The arrays may be overwritten as soon as save returns, also on one CPU device, where no copy would be needed to read them."""
    overwrite = jax.jit(lambda t: {"w": t["w"] * 0 - 1}, donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in range(3):
        tree = {"w": jnp.arange(4_000_000, dtype=jnp.float32) + step}
        checkpoints.save(step, tree, {})
        jax.block_until_ready(overwrite(tree))
    for step in range(3):
        got = checkpoints.restore({"w": jax.ShapeDtypeStruct((4_000_000,), "float32")}, step)
        assert np.array_equal(got["w"], np.arange(4_000_000, dtype=np.float32) + step)
    checkpoints.close()


def test_keys_survive(tmp_path):
    tree = {"key": jax.random.key(5), "fast": jax.random.key(6, impl="rbg")}
    checkpoints = save(tmp_path, 1, tree=tree)
    shapes = jax.tree.map(lambda k: jax.ShapeDtypeStruct(k.shape, k.dtype), tree)
    got = checkpoints.restore(shapes)
    checkpoints.close()
    assert all(got[n].dtype == k.dtype and jax.random.bits(got[n]) == jax.random.bits(k) for n, k in tree.items())


def test_info(saved):
    info = read_info(saved)
    assert (info["format"], info["step"], info["processes"], info["layout"]) == (1, 3, 1, "zero3=8")
    assert info["packages"]["jax"] == jax.__version__ and info["bytes"] == 2 * 512 + 32 + 4
    check_files(saved)


# ---- what does not fit ----


FITS = [
    (lambda t: t["params"].pop("gain"), False, "it has besides params.gain"),
    (lambda t: t["opt"].update(nu={"w": t["opt"]["mu"]["w"]}), False, "it lacks opt.nu.w"),
    (lambda t: t["opt"].update(nu={"w": t["opt"]["mu"]["w"]}), True, "it lacks opt.nu.w"),
    (lambda t: t["params"].update(gain=jax.ShapeDtypeStruct((9,), "float32")), True, r"these differ: params.gain \{'shape': \[8\]"),
    (lambda t: t["params"].update(gain=jax.ShapeDtypeStruct((8,), "bfloat16")), True, "'dtype': 'bfloat16'"),
]


@pytest.mark.parametrize("change, part, message", FITS)
def test_trees_that_do_not_fit(saved, change, part, message):
    wanted = abstract(values())
    change(wanted)
    with pytest.raises(ValueError, match=message):
        load(saved, wanted, part)


def test_changed_model_names_the_fields():
    old, new = {"embed": 64, "attn": {"heads": 4, "window": None}}, {"embed": 64, "attn": {"heads": 8, "window": None}, "tied": True}
    assert differences(old, new) == ["attn.heads: 4 -> 8", "tied: absent -> True"] and differences({"a": (1, 2)}, {"a": [1, 2]}) == []
    check_same("model", old, old, "run")
    with pytest.raises(
        ValueError, match=r"run was made with another model \(attn.heads: 4 -> 8; tied: absent -> True\). Set these fields back"
    ):
        check_same("model", old, new, "run")


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint of this run"):
        Checkpoints(tmp_path / "new").restore({})


def test_damage_stops_a_load(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "3")
    bad = max((p for p in (tmp_path / "3").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(bad.read_bytes())
    data[500] ^= 1
    bad.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        load(tmp_path / "3", abstract(values()))
    assert f"{bad} has other contents than were written" in str(caught.value)


# ---- retention ----


KEPT = [
    ([80, 90, 100, 110], {}, (2, 0, 0), {100, 110}),
    ([80, 90, 100, 110], {80: 1.0, 110: 2.0}, (1, 0, 1), {110, 80}),
    ([9, 10, 11], {}, (1, 5, 0), {11, 10}),
    ([1, 2, 3], {1: 3.0, 2: 3.0}, (1, 0, 1), {3, 2}),
    ([1, 2], {}, (5, 0, 3), {1, 2}),
    ([], {}, (1, 0, 0), set()),
]


@pytest.mark.parametrize("steps, scores, keep, want", KEPT)
def test_kept(steps, scores, keep, want):
    assert kept(steps, scores, *keep) == want


def test_keep_last_0_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1 checkpoint must stay"):
        Checkpoints(tmp_path, keep_last=0)


def test_retention_and_foreign_runs(tmp_path):
    """C24: by number, plus the best; another run's higher step is neither counted nor removed nor overwritten."""
    save(tmp_path / "other", 99999).close()
    (tmp_path / "run").mkdir()
    shutil.copytree(tmp_path / "other" / "99999", tmp_path / "run" / "99999")
    (tmp_path / "run" / "notes").mkdir()
    checkpoints = save(tmp_path / "run", 80, 90, 100, 110, keep_last=2, keep_best=1, scores={80: 1.5, 90: 2.0, 100: 1.6})
    assert checkpoints.said == [f"Left {tmp_path}/run/99999 alone: it belongs to another run."]
    assert checkpoints.steps() == [80, 100, 110] and checkpoints.latest() == 110
    assert (tmp_path / "run" / "99999" / "info.json").exists() and (tmp_path / "run" / "notes").exists()
    with pytest.raises(FileExistsError, match="99999 holds something that this run did not write"):
        checkpoints.save(99999, place(values(), SHARDED), INFO)
    assert not checkpoints.save(110, place(values(), SHARDED), INFO)
    checkpoints.score(100, 1.0)
    assert checkpoints.steps() == [100, 110]
    checkpoints.close()


def test_nothing_is_removed_before_the_new_one_is_whole(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1, keep_last=1)
    seen, finish = [], checkpoints._finish

    def slow(path, info):
        finish(path, info)
        seen.append(checkpoints.steps())

    monkeypatch.setattr(checkpoints, "_finish", slow)
    checkpoints.save(2, place(values(), SHARDED), INFO)
    checkpoints.close()
    assert seen == [[1, 2]] and checkpoints.steps() == [2]


# ---- failures ----


def run_python(code, *args, env=None, check=True, **options):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        **options,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def test_full_disk_leaves_the_previous(tmp_path):
    """A disk (a true small one where allowed, else a limit on file size) fills up while the second checkpoint is being written."""
    code = """
        import os, resource, signal, sys, time
        from pathlib import Path
        import jax, jax.numpy as jnp
        import meshloom.weights.checkpoint as c
        folder = Path(sys.argv[1])
        checkpoints = c.Checkpoints(folder, keep_last=1)
        checkpoints.save(1, {"w": jnp.ones(100_000)}, {}); checkpoints.wait()
        c.free = lambda path: 10**12   # the check beforehand sees nothing
        if sys.argv[2] == "limit":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
        try:
            checkpoints.save(2, {"w": jnp.arange(2_000_000.0)}, {})
            for step in range(100):
                checkpoints.check(); time.sleep(0.1)
        except OSError as error:
            print("SAID", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("STEPS", checkpoints.steps(), sorted(p.name for p in folder.iterdir()))
        got = checkpoints.restore({"w": jax.ShapeDtypeStruct((100_000,), "float32")})
        print("SUM", got["w"].sum())
        checkpoints.save(3, {"w": jnp.arange(100_000.0)}, {}); checkpoints.wait()
        print("AFTER", checkpoints.steps())
    """
    mounted = (
        os.getuid() == 0
        and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(tmp_path)], capture_output=True).returncode == 0
    )
    try:
        out = run_python(code, tmp_path, "disk" if mounted else "limit", timeout=60).stdout
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert f"SAID Cannot write checkpoint {tmp_path}/2 (8 MB, 8,000,000 bytes): " in out, out
    assert ("the disk has" if mounted else "a file would be larger") in out and "The checkpoint of step 1 is whole." in out
    assert "STEPS [1] ['1', 'run.json', 'writing.json']" in out and "SUM 100000.0" in out and "AFTER [3]" in out


def test_no_room_is_known_before_writing(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1)
    monkeypatch.setattr("meshloom.weights.checkpoint.free", lambda path: 100)
    with pytest.raises(OSError, match=r"Cannot write checkpoint .*/2 \(1.06 kB, 1,060 bytes\): the disk has .* free.*step 1 is whole"):
        checkpoints.save(2, place(values(), SHARDED), INFO)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "run.json", "writing.json"]
    checkpoints.close()


def test_kill_during_save_leaves_the_previous(tmp_path):
    """kill -9 at several moments of an asynchronous save: the newest whole checkpoint loads and what is unfinished is removed."""
    code = """
        import os, signal, sys, threading
        import jax, jax.numpy as jnp
        from meshloom.weights.checkpoint import Checkpoints
        checkpoints = Checkpoints(sys.argv[1], keep_last=1)
        last = checkpoints.latest() or 0
        for step in range(last + 1, 10_000):
            checkpoints.save(step, {"w": jnp.full(1_000_000, float(step))}, {})
            if step == last + 2:
                threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    """
    newest = 0
    for delay in ("0.003", "0.05", "0.13"):
        assert run_python(code, tmp_path, delay, check=False, timeout=60).returncode == -signal.SIGKILL
        checkpoints = Checkpoints(tmp_path, keep_last=1)
        step = checkpoints.latest()
        assert step > newest and all(not p.name.endswith("-tmp") for p in tmp_path.iterdir())
        got = checkpoints.restore({"w": jax.ShapeDtypeStruct((1_000_000,), "float32")})
        assert np.all(np.asarray(got["w"]) == step)
        checkpoints.close()
        newest = step


def test_two_processes_write_one_reads(tmp_path):
    """Each process writes its shards and lists its files; one process without the others loads the whole."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    code = textwrap.dedent("""
        import sys, jax, numpy as np
        jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from meshloom.weights.checkpoint import Checkpoints, check_files
        where = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
        w = jax.make_array_from_callback((8, 6), where, lambda i: np.arange(48, dtype=np.float32).reshape(8, 6)[i])
        checkpoints = Checkpoints(sys.argv[1], keep_last=1)
        for step in (1, 2):
            checkpoints.save(step, {"w": w}, {"model": {}})
        checkpoints.wait()
        got = checkpoints.restore({"w": jax.ShapeDtypeStruct((8, 6), "float32", sharding=where)})
        assert all(np.array_equal(s.data, np.arange(48).reshape(8, 6)[s.index]) for s in got["w"].addressable_shards)
        checkpoints.close()
    """)
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pair = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(port), str(i)], env=env, stderr=subprocess.PIPE, text=True)
        for i in (0, 1)
    ]
    try:
        said = [p.communicate(timeout=80)[1] for p in pair]
    finally:
        for p in pair:
            p.kill()
    assert [p.returncode for p in pair] == [0, 0], said
    assert read_info(tmp_path / "2")["processes"] == 2 and whole(tmp_path / "2") and not (tmp_path / "1").exists()
    listed = json.loads((tmp_path / "2" / "files.1.json").read_text())
    assert listed and all(n.startswith("ocdbt.process_1/") for n in listed)
    got = load(tmp_path / "2", {"w": jax.ShapeDtypeStruct((8, 6), "float32")})
    assert np.array_equal(got["w"], np.arange(48).reshape(8, 6))
    Path(tmp_path / "2" / "files.1.json").unlink()
    assert not whole(tmp_path / "2")
