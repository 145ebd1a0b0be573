"""A real Ray cluster of two nodes: shards, encoding and fitting with the results of one process."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import random_shards
import torch
from hypothesis import given, settings
from patience import PATIENCE

import drq_fast
from drq_fast import fit as fitting

ray = pytest.importorskip("ray", reason="ray is not installed")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from drq_fast.interop import ray as on_ray  # noqa: E402

N, DIM, STORE = 3000, 8, 100 << 20


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 2, "object_store_memory": STORE}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_worker_niceness", "0")  # with Ray's 15, workers starve beside other processes
        environment.setenv("RAY_DATA_USAGE_DISABLED", "1")  # its thread goes on after the shutdown, logging errors
        try:
            made = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
            made.add_node(**settings)
        except Exception as error:  # Ray's own limit, which no setting changes
            if "timed out during startup" not in str(error):
                raise
            pytest.skip("Ray did not start a node within its 30 seconds")
        ray.init(address=made.address, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def x():
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(N // 2, DIM, generator=generator)
    return some[torch.randint(len(some), (N,), generator=generator)]  # with duplicates, whose scores tie


def saved(index, x, rows, path):
    """A shard with some rows of x, that has codec and lists of the index."""
    part = drq_fast.Index.load(index)
    part.reset()
    part.add(x[rows], ids=rows, beam=16)
    part.save(path)


@pytest.fixture(scope="module")
def shards(cluster, tmp_path_factory):
    """A folder, and four actors that search the shards in it."""
    folder = tmp_path_factory.mktemp("shards")
    empty = drq_fast.Index(drq_fast.Codec(torch.zeros(2, DIM), torch.ones(1)))
    for s in range(random_shards.SHARDS):
        empty.save(folder / f"{s}.drq")
    with on_ray.ShardedIndex(folder, timeout=PATIENCE) as made:
        yield folder, made


def load_again(sharded):
    """Other files are in the place of those that the actors had loaded."""
    ray.get([actor.__ray_call__.remote(lambda shard: setattr(shard, "_loaded", None)) for actor in sharded._actors])
    sharded._describe()


@settings(max_examples=40, deadline=None)
@given(case=random_shards.CASES)
def test_random_shards_have_the_results_of_one_index(shards, case):
    folder, sharded = shards
    one = random_shards.made(case, folder)
    load_again(sharded)
    assert len(sharded) == len(one.index)
    sharded.at_once = 1 + case.seed % random_shards.SHARDS
    for _ in range(3):
        asked = random_shards.random_search(case, one)
        random_shards.assert_same(sharded.search(one.query, **asked), one.index, one.query, asked)


def test_results_are_in_kind_of_one_query(shards, x):
    index, sharded = restored(shards, x, "l2")
    one = sharded.search(x[0].numpy(), k=3)
    assert isinstance(one.ids, np.ndarray)
    assert one.ids.tolist() == index.search(x[0], k=3).ids.tolist()
    assert sharded.search(x[:0], k=3).ids.shape == (0, 3)
    assert sharded.search(x[:2], k=N + 5).ids.shape == (2, N + 5)


def restored(shards, x, metric, lists=None):
    """An index of x, and the actors with its rows in shards of very different size, one of them empty."""
    folder, sharded = shards
    index = drq_fast.Index.build(x, bits=16, metric=metric, lists=lists, vectors="float16", seed=0, tune=False)
    index.save(folder / "all.index")
    owner = torch.from_numpy(np.random.default_rng(0).choice(3, N, p=[0.7, 0.29, 0.01]))
    for s in range(random_shards.SHARDS):
        saved(folder / "all.index", x, (owner == s).nonzero().squeeze(1), folder / f"{s}.drq")
    load_again(sharded)
    sharded.at_once = random_shards.SHARDS
    return index, sharded


def process_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def test_killed_shards_come_back_and_no_query_is_lost(shards, x):
    """Two workers are killed, two at a time, during a stream of 1,000 queries."""
    index, sharded = restored(shards, x, "cosine", lists=12)
    query, options = x[torch.arange(1000) * 7 % N] + 0.01, {"k": 5, "probes": 12}
    expected = drq_fast.merge([index.search(query, k=9, probes=12)], 5, metric="cosine")  # in the order of ids
    answered, killed = threading.Semaphore(0), []

    def kill():
        for _ in range(2):
            for _ in range(300):
                answered.acquire()
            killed.append([process_of(actor) for actor in sharded._actors[:2]])
            for pid in killed[-1]:
                os.kill(pid, signal.SIGKILL)  # while later queries are under way

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    for q in range(1000):
        found = sharded.search(query[q], **options)
        assert torch.equal(found.scores, expected.scores[q])
        assert found.ids.tolist() == expected.ids[q].tolist()
        answered.release()
    killer.join(PATIENCE)
    after = [process_of(actor) for actor in sharded._actors[:2]]
    assert all(len({first, second, last}) == 3 for first, second, last in zip(*killed, after, strict=True))


def test_a_shard_that_stays_away_is_named(cluster, x, tmp_path):
    index = drq_fast.Index.build(x, bits=16, seed=0, tune=False)
    index.save(tmp_path / "all.index")
    paths = [tmp_path / f"{s}.drq" for s in range(2)]
    for s, path in enumerate(paths):
        saved(tmp_path / "all.index", x, torch.arange(s, N, 2), path)
    with on_ray.ShardedIndex(paths, timeout=PATIENCE) as sharded:
        paths[1].unlink()
        os.kill(process_of(sharded._actors[1]), signal.SIGKILL)
        others = drq_fast.Index(drq_fast.Codec(torch.zeros(2, DIM), torch.ones(1)))
        for put, reason in (
            (lambda: None, "load: .*cannot be read"),
            (lambda: paths[1].write_bytes(b"cut"), "load: .*not a complete"),
            (lambda: others.save(paths[1]), ".*now has another codec"),
        ):
            put()
            with pytest.raises(on_ray.ShardsMissing, match=rf"^search: no answer from .*1\.drq \({reason}"):
                sharded.search(x[:3], k=5)
            _, ids, missing = sharded.search(x[:3], k=5, allow_partial=True)
            assert missing == (str(paths[1]),)
            keep = torch.arange(0, N, 2)
            assert torch.equal(ids, index.search(x[:3], k=5, keep=keep).ids)
        ray.kill(sharded._actors[1])  # and is not restarted
        with pytest.raises(on_ray.ShardsMissing, match=r"1\.drq \(ActorDiedError\)"):
            sharded.search(x[:3], k=5, refine=None)
        ray.kill(sharded._actors[0])
        _, ids, missing = sharded.search(x[:3], k=5, refine=20, allow_partial=True)
        assert ids.tolist() == [[-1] * 5] * 3
        assert set(missing) == set(map(str, paths))


def test_changes_go_to_the_right_shard_and_survive_it(cluster, x, tmp_path):
    index = drq_fast.Index.build(x[:100], bits=16, seed=0, tune=False)
    index.save(tmp_path / "all.index")
    for s in range(2):
        saved(tmp_path / "all.index", x, torch.arange(s, 90, 2)[s:], tmp_path / f"{s}.drq")
    with on_ray.ShardedIndex(tmp_path, timeout=PATIENCE) as sharded:
        assert list(sharded.sizes.values()) == [45, 44]
        ids = sharded.add(x[90:95])
        assert ids.tolist() == [100, 101, 102, 103, 104]  # ids that were given once are not given again
        assert list(sharded.sizes.values()) == [45, 49]
        sharded.upsert(x[95:98].numpy(), [0, 3, 200])
        unanswered = sharded._actors[1].call.remote(None, "upsert", x[:1].numpy(), np.array([300]), 1)
        assert ray.get(unanswered).size == 50
        assert sharded.add(x[:1]).tolist() == [301]
        sharded.remove([300, 301])
        sharded.remove(torch.tensor([2, 5]))
        assert list(sharded.sizes.values()) == [45, 48]
        for actor in sharded._actors:
            os.kill(process_of(actor), signal.SIGKILL)
        assert sharded.search(x[95:98], k=1).ids[:, 0].tolist() == [0, 3, 200]
        with pytest.raises(ValueError, match=r"^remove: ids must be in the index, got 2, which is not\.$"):
            sharded.remove([4, 2])
        with pytest.raises(ValueError, match=r"^add: ids must be new, got 200, which is in the index already\.$"):
            sharded.add(x[:2], ids=[300, 200])
        with pytest.raises(ValueError, match=r"^search: query must be \[Q, 8\], got \[1, 5\]\.$"):
            sharded.search(x[:1, :5])
        assert len(sharded) == 93
    assert len(drq_fast.Index.load(tmp_path / "0.drq")) == 45


def test_an_id_in_two_shards_and_a_shard_that_is_not_there(cluster, x, tmp_path):
    codec = drq_fast.Index.build(x, bits=16, seed=0, tune=False).codec
    paths = [str(tmp_path / f"{name}.drq") for name in "ab"]
    for path, ids in zip(paths, (range(0, 20, 2), [1, 3, 8]), strict=True):
        index = drq_fast.Index(codec)
        index.add(x[: len(ids)], ids=ids)
        index.save(path)
    with pytest.raises(ValueError, match=r"b\.drq must be without the ids of .*a\.drq, got 8 in both\.$"):
        on_ray.ShardedIndex(paths, options={"num_cpus": 2})  # all cores of the cluster
    with pytest.raises(RuntimeError, match=r"^ShardedIndex: no answer from .*none\.drq \(load: .*cannot be read"):
        on_ray.ShardedIndex([tmp_path / "none.drq"])
    with pytest.raises(ValueError, match=r"^ShardedIndex: paths must be different, got .*a\.drq more than once\.$"):
        on_ray.ShardedIndex([paths[0], paths[0]])
    with pytest.raises(ValueError, match=r"^ShardedIndex: .* must be a folder with \.drq files, got none\.$"):
        on_ray.ShardedIndex(tmp_path.parent)


@pytest.fixture(scope="module")
def codec(x):
    return drq_fast.Index.build(x, bits=24, seed=0, tune=False).codec


def test_a_dataset_gets_a_column_of_codes(cluster, x, codec):
    dataset = ray.data.from_numpy(x.numpy()).rename_columns({"data": "embedding"})
    rows = on_ray.encode(codec, dataset, beam=4, workers=2, batch_size=700).take_all()
    assert sorted(rows[0]) == ["codes", "embedding"]
    found = {row["embedding"].tobytes(): list(row["codes"]) for row in rows}
    assert len(rows) == N
    for vector, code in zip(x.numpy(), codec.encode(x, beam=4).tolist(), strict=True):
        assert found[vector.tobytes()] == code
    with pytest.raises(ValueError, match=r"^encode: column must be one of embedding, got 'x'\.$"):
        on_ray.encode(codec, dataset, "x")
    with pytest.raises(ValueError, match=r"^encode: output must be the name of a new column, got 'embedding'\.$"):
        on_ray.encode(codec, dataset, output="embedding")
    with pytest.raises(ValueError, match=r"^encode: workers must be an integer of at least 1, got 0\.$"):
        on_ray.encode(codec, dataset, workers=0)


def files_of(x, folder, count):
    folder.mkdir()
    paths = []
    for i, part in enumerate(x.numpy().reshape(count, -1, x.shape[1])):
        ids = np.arange(len(part)) + i * len(part)
        paths.append(folder / f"{i}.parquet")
        pq.write_table(pa.table({"id": ids, "embedding": list(part)}), paths[-1])
    return paths


def workers_alive(cluster):
    """The processes of Ray Data's workers in this cluster."""
    nodes = {process.process.pid for node in cluster.list_all_nodes() for process in node.all_processes["raylet"]}
    pids = []
    for path in glob.glob("/proc/[0-9]*"):
        try:
            name, parent = Path(path, "cmdline").read_bytes(), Path(path, "stat").read_text().rpartition(")")[2]
        except OSError:  # it has ended
            continue
        if name.startswith(b"ray::MapWorker") and int(parent.split()[1]) in nodes:
            pids.append(int(path.rpartition("/")[2]))
    return pids


def test_a_killed_worker_loses_no_file_and_writes_no_row_twice(cluster, x, codec, tmp_path):
    paths, out = files_of(x, tmp_path / "in", 12), tmp_path / "out"
    slow = {"beam": 2000}
    killed = []

    def kill():
        while not killed and threading.main_thread().is_alive():
            if list(out.glob("*.parquet")):
                killed.extend(workers_alive(cluster)[:1])
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert on_ray.encode_files(codec, paths, out, workers=2, **slow) == N
    killer.join(10)
    assert killed
    tables = [pq.read_table(path) for path in sorted(out.glob("*.parquet"))]
    assert sorted(id for table in tables for id in table["id"].to_pylist()) == list(range(N))
    codes = codec.encode(x, **slow).numpy()
    for table in tables:
        np.testing.assert_array_equal(codes[table["id"].to_numpy()], table["codes"].to_pylist())
    before = {path: path.stat().st_ino for path in out.glob("*.parquet")}
    pq.write_table(pa.table({"id": [0], "embedding": [[1.0, 2.0]]}), paths[0])
    with pytest.raises(ValueError, match=r"^encode: .*/in/0\.parquet has a vector of 2 dimensions in row 0, and the"):
        on_ray.encode_files(codec, paths, out, workers=1, **slow)
    assert before == {path: path.stat().st_ino for path in out.glob("*.parquet")}  # the others were not made again


def test_a_fit_does_not_depend_on_the_number_of_workers(cluster, x, monkeypatch):
    dataset = ray.data.from_numpy(list(x.numpy().reshape(6, -1, DIM)))
    options = {"dim": DIM, "column": "data", "rounds": 40, "seed": 0, "block": 256}
    one, two, four = (on_ray.fit(dataset, 16, 4, codebooks=2, workers=workers, **options) for workers in (1, 2, 4))
    assert torch.equal(one.codec.codebook, two.codec.codebook)
    assert torch.equal(one.codec.codebook, four.codec.codebook)
    assert one.codec == two.codec == four.codec
    monkeypatch.setattr(fitting, "BLOCK", 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer = drq_fast.RecurrentQuantizer(DIM, 16, 4, codebooks=2)
        errors = layer.fit(x, rounds=40, seed=0, sample=N)
    finally:
        torch.set_num_threads(threads)
    assert one.errors == pytest.approx(errors, abs=1e-6)
    torch.testing.assert_close(one.codec.codebook, layer.codec().codebook, rtol=0, atol=0)


def test_a_sample_of_a_dataset(cluster, x):
    layers = [drq_fast.RecurrentQuantizer(DIM, 16, 2) for _ in range(2)]
    blocks = [ray.data.from_numpy(list(x.numpy().reshape(count, -1, DIM))) for count in (3, 10)]
    errors = [
        layer.fit(on_ray.batches(dataset, "data", dim=DIM), sample=500, seed=0, rounds=5)
        for layer, dataset in zip(layers, blocks, strict=True)
    ]
    assert errors[0] == errors[1]
    with pytest.raises(ValueError, match=r"^fit: column must be one of data, got 'x'\.$"):
        next(on_ray.batches(blocks[0], "x", dim=DIM))


def test_command_line(cluster, x, tmp_path):
    paths, run = files_of(x, tmp_path / "in", 3), tmp_path / "run"
    np.save(tmp_path / "x.npy", x.numpy())
    program = [sys.executable, "-m", "drq_fast"]
    fitted = [*program, "fit", str(run), str(tmp_path / "x.npy"), "--rounds", "2", "--levels", "2"]
    subprocess.run(fitted, check=True, capture_output=True)
    encode = [*program, "encode", str(run), f"{tmp_path}/in/*.parquet", "--json", "--workers", "1", "--ray"]
    done = subprocess.run([*encode, cluster.address], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["rows"] == N
    layer = drq_fast.RecurrentQuantizer.load(run / "model.drq")
    for path, part in zip(paths, x.reshape(3, -1, DIM), strict=True):
        codes = pq.read_table(run / "codes" / path.name)["codes"].to_pylist()
        assert codes == layer.encode(part).tolist()


@pytest.mark.slow
def test_twenty_million_codes_in_eight_shards(cluster, tmp_path):
    generator = torch.Generator().manual_seed(0)
    codec = drq_fast.Codec(torch.randn(256, 32, generator=generator), 0.7 ** torch.arange(4), None)
    index, count = drq_fast.Index(codec), 2_500_000
    for s in range(8):
        codes = torch.randint(256, (count, 4), generator=generator, dtype=torch.uint8)
        shard = drq_fast.Index(codec)
        shard.add_codes(codes, ids=torch.arange(s * count, (s + 1) * count))
        shard.save(tmp_path / f"{s}.drq")
        index.add_codes(codes)
    query = torch.randn(50, 32, generator=generator)
    flags = torch.arange(8 * count) % 1000 == 7
    with on_ray.ShardedIndex(tmp_path, timeout=PATIENCE) as sharded:
        assert len(sharded) == 8 * count
        for options in ({"k": 1}, {"k": 100}, {"k": 50, "levels": 2}, {"k": 10, "keep": flags}):  # levels=2: many ties
            for at_once in (8, 2):
                sharded.at_once = at_once
                random_shards.assert_same(sharded.search(query, **options), index, query, options)
