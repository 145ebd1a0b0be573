"""Texts and metadata beside an index: exact search at first, codes later, files that belong together."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import drq_fast
from drq_fast.interop.documents import Documents, Record, marginal_relevance

N, D = 300, 8
LISTS = "numbers in lists of equal length"


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def records(n, first=0):
    return [Record(f"id{i}", f"text {i}", {"number": i, "even": i % 2 == 0}) for i in range(first, first + n)]


def filled(x, **options):
    store = Documents(**options)
    store.upsert(records(len(x)), x)
    return store


def ids_of(found):
    return [record.id for record, _ in found]


def nearest(x, query, k):
    scores = x @ query / np.linalg.norm(x, axis=1) / np.linalg.norm(query)
    order = np.argsort(-scores)[:k]
    return [f"id{i}" for i in order], scores[order]


def test_an_empty_store():
    store = Documents()
    assert (len(store), store.index, store.fitted) == (0, None, False)
    assert store.search([1.0, 2.0], 3) == [] == store.diverse([1.0], 3, 9, 0.5) == store.get(["a"])
    store.remove(["a"])
    store.clear()
    store.upsert([], [])
    with pytest.raises(RuntimeError, match=r"fit: there is nothing to fit a codec to; add texts first\."):
        store.fit()


def test_few_embeddings_are_searched_exactly(x):
    store = filled(x)
    assert not store.fitted
    for query in x[:5] + 0.1:
        ids, scores = nearest(x, query, 7)
        found = store.search(query.tolist(), 7)
        assert ids_of(found) == ids
        np.testing.assert_allclose([score for _, score in found], scores, atol=1e-6)
    assert found[0][0] == records(N)[int(ids[0][2:])]
    assert len(store.search(x[0], 1000)) == N


def test_lengths_do_not_matter_to_cosine(x):
    """Nothing is encoded yet, and `fit` encodes directions: there is nothing to warn of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*differ in length")
        store = filled(x * np.geomspace(0.1, 10, N, dtype=np.float32)[:, None], bits=16)
        assert ids_of(store.search(x[3], 7)) == nearest(x, x[3], 7)[0]
        store.fit()
    assert store.index.codec.unit


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_other_metrics(x, metric):
    found = filled(x, metric=metric).search(x[3], 5)
    scores = np.square(x - x[3]).sum(axis=1) if metric == "l2" else -(x @ x[3])
    assert ids_of(found) == [f"id{i}" for i in np.argsort(scores)[:5]]


def test_where_is_applied_in_the_scan(x):
    store, even = filled(x), np.arange(0, N, 2)
    found = store.search(x[1], 5, lambda record: record.metadata["even"])
    assert ids_of(found) == [f"id{even[int(id[2:])]}" for id in nearest(x[even], x[1], 5)[0]]
    assert ids_of(store.search(x[1], 5, lambda record: record.id == "id7")) == ["id7"]
    assert store.search(x[1], 5, lambda record: False) == []
    assert store.matching(lambda record: record.metadata["number"] > 297) == records(2, 298)


def test_upsert_replaces_and_removed_ids_are_new_again(x):
    store = filled(x[:4])
    store.upsert([Record("id1", "new", {})], x[10:11])
    assert len(store) == 4
    assert store.get(["id1", "unknown", "id0"]) == [Record("id1", "new", {}), records(1)[0]]
    assert ids_of(store.search(x[10], 1)) == ["id1"]
    store.remove(["id1", "id1", "unknown"])
    assert ("id1" in store, "id0" in store, len(store.index)) == (False, True, 3)
    store.upsert([Record("id1", "a", {}), Record("id1", "b", {})], x[[5, 6]])  # the last one counts
    assert store.get(["id1"]) == [Record("id1", "b", {})]
    np.testing.assert_allclose(store.embeddings(["id1"])[0], x[6] / np.linalg.norm(x[6]), atol=1e-6)
    store.clear()
    assert (len(store), store.search(x[0], 1)) == (0, [])


def test_the_codec_is_fitted_when_there_are_enough(x):
    store = Documents(bits=16, fit_at=N)
    store.upsert(records(N - 1), x[:-1])
    assert not store.fitted
    store.upsert(records(1, N - 1), x[-1:])
    assert store.fitted
    index = store.index
    assert (index.bits, index.metric, index.vectors, len(index)) == (16, "cosine", "float16", N)
    found = store.search(x[3], 10)  # all of the first ten are among the 100 best by codes
    assert ids_of(found)[0] == "id3"
    assert len(set(ids_of(found)) & set(nearest(x, x[3], 10)[0])) >= 9
    assert ids_of(store.search(x[3], 10, refine=N)) == nearest(x, x[3], 10)[0]
    store.upsert([Record("more", "", {})], -x[3:4])
    store.remove(["id0"])
    assert ids_of(store.search(-x[3], 1)) == ["more"]
    assert store.index is index  # is not fitted again by itself
    with pytest.raises(ValueError, match=r"search: refine must be an integer from 10 "):
        store.search(x[3], 10, refine=1)


def test_codes_alone(x):
    store = filled(x, bits=16, vectors=None, fit_at=N)
    assert store.index.vectors is None
    scores, numbers = store.index.search(x[3:4], 4)
    found = store.search(x[3], 4)
    assert ids_of(found) == [f"id{i}" for i in numbers[0]]
    assert [score for _, score in found] == scores[0].tolist()
    np.testing.assert_array_equal(store.embeddings(["id9"])[0], store.index.reconstruct([9])[0])
    with pytest.raises(RuntimeError, match="fit: the index has codes only; make the store with vectors="):
        store.fit()
    store.clear()
    assert store.fitted  # the codec stays


def test_an_index_of_your_own(x, tmp_path):
    codec = drq_fast.Codec(torch.from_numpy(x[:64]), torch.tensor([1.0, 0.5]), None)
    store = Documents(index=drq_fast.Index(codec, "ip", vectors="float32"))
    assert (store.fitted, store.bits, store.metric, store.vectors) == (True, 16, "ip", "float32")
    store.upsert(records(N), x)
    assert ids_of(store.search(x[3], 5)) == [f"id{i}" for i in np.argsort(-(x @ x[3]))[:5]]
    store.save(tmp_path / "a.jsonl")
    assert Documents.load(tmp_path / "a.jsonl").index.bits == 12


def test_diverse_is_marginal_relevance_by_its_definition(x):
    query, some = x[:1], x[1:20]
    unit = some / np.linalg.norm(some, axis=1, keepdims=True)
    relevance = unit @ query[0] / np.linalg.norm(query)
    for balance in (0.0, 0.3, 1.0):
        chosen: list[int] = []
        for _ in range(6):
            left = [i for i in range(19) if i not in chosen]
            worth = [balance * relevance[i] - (1 - balance) * max((unit[i] @ unit[j] for j in chosen), default=0)
                     for i in left]  # fmt: skip
            chosen.append(left[int(np.argmax(worth))])
        assert marginal_relevance(query, some, 6, balance) == chosen
    assert len(marginal_relevance(query, some, 99, 0.5)) == 19
    store = filled(x)
    assert store.diverse(x[3], 5, 20, 1.0) == store.search(x[3], 5)
    assert ids_of(store.diverse(x[3], 5, 20, 0.5)) != ids_of(store.search(x[3], 5))


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("fit_at", [None, N])
def test_files(x, tmp_path, fit_at, mmap):
    store = filled(x, bits=8, fit_at=fit_at)
    store.remove(["id5"])
    store.upsert([Record("é\u2028\n", "ü\r\n\x0b", {"list": [1, None, {"a": 0.5}]})], x[5:6])
    store.save(tmp_path / "folder" / "texts.jsonl")
    again = Documents.load(tmp_path / "folder" / "texts.jsonl", mmap=mmap)
    assert (again.fitted, again.fit_at, again.bits, len(again)) == (fit_at is not None, fit_at, 8, N)
    assert again.search(x[5], 9) == store.search(x[5], 9)
    assert again.search(x[5], 1)[0][0].metadata == {"list": [1, None, {"a": 0.5}]}
    again.upsert([Record("id5", "again", {})], x[5:6])
    again.save(tmp_path / "folder" / "texts.jsonl")
    assert again.index.ids.max() == N + 1  # the number of the removed one is not given out again
    assert len(list((tmp_path / "folder").iterdir())) == 2  # the earlier index is gone
    assert len(Documents.load(tmp_path / "folder" / "texts.jsonl")) == N + 1


@pytest.mark.parametrize("fit_at", [None, N])
def test_copies(x, fit_at):
    store = filled(x, bits=16, fit_at=fit_at)
    for again in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert again.search(x[5], 9) == store.search(x[5], 9)
        again.remove(["id5"])
        again.upsert(records(1, N), x[:1])
        assert len(again) == N
        assert "id5" in store


def test_an_empty_store_can_be_saved(tmp_path):
    Documents(bits=8, vectors=None).save(tmp_path / "a.jsonl")
    again = Documents.load(tmp_path / "a.jsonl")
    assert (len(again), again.index, again.bits, again.vectors) == (0, None, 8, None)


def test_an_interrupted_save_changes_nothing(x, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    store = filled(x[:5])
    store.save(path)
    store.remove(["id1"])

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("drq_fast.files.write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.save(path)
    assert len(Documents.load(path)) == 5
    assert len(list(tmp_path.iterdir())) == 2
    store.save(path)
    assert len(Documents.load(path)) == 4


def test_what_killed_saves_left_is_removed_by_the_next(x, tmp_path):
    store, others = filled(x[:5]), ["a.jsonl.drq", "a-0123456789abcdef.drq", "b.jsonl-0123456789abcdef.drq"]
    store.save(tmp_path / "a.jsonl")
    for name in (*others, "a.jsonl-0123456789abcdef.drq"):
        (tmp_path / name).touch()
    store.save(tmp_path / "a.jsonl")
    assert {path.name for path in tmp_path.iterdir()} > {*others, "a.jsonl"}
    assert len(list(tmp_path.iterdir())) == len(others) + 2
    assert len(Documents.load(tmp_path / "a.jsonl")) == 5


def test_a_save_during_a_load(x, tmp_path, monkeypatch):
    """The texts name an index that is gone when it is to be read: both are read again."""
    store, loaded = filled(x[:5]), drq_fast.Index.load
    store.save(tmp_path / "a.jsonl")

    def load(path, **options):
        monkeypatch.undo()
        store.remove(["id1"])
        store.save(tmp_path / "a.jsonl")
        return loaded(path, **options)

    monkeypatch.setattr(drq_fast.Index, "load", load)
    assert len(Documents.load(tmp_path / "a.jsonl")) == 4
    for path in tmp_path.glob("*.drq"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"\.drq cannot be read"):
        Documents.load(tmp_path / "a.jsonl")


def test_damaged_files_are_refused(x, tmp_path):
    path = tmp_path / "a.jsonl"
    filled(x[:5]).save(path)
    good = path.read_text()
    header, _, body = good.partition("\n")

    def refused(text, message):
        path.write_text(text)
        with pytest.raises(drq_fast.FileError, match=message):
            Documents.load(path)

    refused(good.replace("text 3", "text 4"), "corrupted")
    refused(good[:-20], "corrupted")
    refused("", "not written by drq_fast")
    refused("[" * 100_000, "not written by drq_fast")
    refused(json.dumps(json.loads(header) | {"version": 2}) + "\n" + body, "of version 2")
    refused(json.dumps(json.loads(header) | {"index": "../a.drq"}) + "\n" + body, "name of a file beside it")
    refused(json.dumps(json.loads(header) | {"index": None}) + "\n" + body, "ids must be those of None")
    refused(json.dumps(json.loads(header) | {"next": 2}) + "\n" + body, "next must be")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="cannot be read"):
        Documents.load(path)


@pytest.mark.parametrize(
    ("record", "embeddings", "error", "message"),
    [
        (Record(1, "a", {}), [[1.0]], TypeError, "add: ids must be strings, got int."),
        (Record("a", None, {}), [[1.0]], TypeError, "add: texts must be strings, got NoneType."),
        (Record("a", "a", []), [[1.0]], TypeError, "add: metadata of 'a' must be a dict, got list."),
        (Record("a", "a", {}), [[1.0], [2.0]], ValueError, "add: embeddings must be 1, one per text, got 2."),
        (Record("a", "a", {}), [1.0], ValueError, "add: embeddings must be [n, D], got [1]."),
        (Record("a", "", {}), [[np.nan]], ValueError, "upsert: x must be finite, got NaN or infinity in row 0."),
        (Record("a", "", {}), [["b"]], TypeError, f"add: embeddings must be {LISTS}, got others."),
    ],
)  # fmt: skip
def test_wrong_records(record, embeddings, error, message):
    store = Documents()
    with pytest.raises(error) as caught:
        store.upsert([record], embeddings)
    assert str(caught.value) == message
    store.upsert([Record("b", "", {})], [[1.0, 2.0, 3.0]])  # of any number of dimensions
    assert len(store) == 1


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_what_a_fit_would_refuse_is_refused_at_once(metric):
    store = Documents(metric=metric, fit_at=2, bits=8)
    for value, message in ((1e6, "x must be finite in torch.float16"), (1e-6, "0.0001 somewhere in each vector")):
        with pytest.raises(ValueError, match=message):
            store.upsert(records(1), [[value, 0.0]])
        assert len(store) == 0
    store.upsert(records(2), [[1.0, 0.0], [0.0, 1.0]])
    assert store.fitted


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes"])
def test_metadata_must_be_json(value):
    with pytest.raises(TypeError, match="add: metadata of 'a' must be JSON, got something else"):
        Documents().upsert([Record("a", "", {"key": value})], [[1.0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 12}, "bits must be a multiple of 8, got 12."),
        ({"metric": "dot"}, "metric must be one of 'l2', 'ip', 'cosine', got 'dot'."),
        ({"vectors": "uint8"}, "vectors must be one of 'float32', 'float16', 'int8', got 'uint8'."),
        ({"fit_at": 0}, "fit_at must be an integer of at least 1, got 0."),
    ],
)
def test_wrong_settings(arguments, message):
    with pytest.raises(ValueError, match="Documents") as caught:
        Documents(**arguments)
    assert str(caught.value) == f"Documents: {message}"


def test_an_index_that_is_not_empty_is_refused(x):
    index = drq_fast.Index(drq_fast.Codec(torch.from_numpy(x[:256]), torch.tensor([1.0]), None))
    index.add(x[:2])
    with pytest.raises(ValueError, match="index must be empty, got 2 vectors without texts"):
        Documents(index=index)


def test_searches_during_changes(x):
    store, errors = filled(x[:100]), []
    done = threading.Event()

    def search():
        try:
            while not done.is_set():
                for record, _ in store.search(x[0], 5) + store.diverse(x[1], 3, 6, 0.5):
                    assert record.text
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(30):
        store.remove([f"id{i}"])
        store.upsert(records(2, 100 + i), x[100 + i : 102 + i])
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(store) == 101


def test_searches_do_not_wait_for_a_fit(x):
    """A fit of many embeddings takes minutes, and holds the lock of changes meanwhile."""
    store, found = filled(x), []

    def search():
        found.append(store.search(x[3], 5, lambda record: record.metadata["even"]))
        found.append(store.diverse(x[3], 5, 20, 0.5))

    thread = threading.Thread(target=search, daemon=True)
    with store._lock:
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert [len(each) for each in found] == [5, 5]


@pytest.mark.parametrize(
    ("module", "missing", "package", "extra"),
    [
        ("langchain", "langchain_core", "langchain-core", "langchain"),
        ("llama_index", "llama_index", "llama-index-core", "llama-index"),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(module, missing, package, extra):
    code = f"""
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else found(name, *rest)
import drq_fast.interop.{module}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    sentence = f"drq_fast.interop.{module}: {package} is missing; `pip install 'drq_fast[{extra}]'` installs it."
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"
