"""Index: add, search at any prefix, remove, filter, and files that are refused when they are not whole."""

from __future__ import annotations

import copy
import json
import pickle
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors import safe_open
from safetensors.torch import save_file

from drq_fast import FileError, Index, RecurrentQuantizer, functional
from drq_fast import index as index_module
from drq_fast.files import checksum

METRICS = ["l2", "ip", "cosine"]


def make_layer(D: int = 5, K: int = 16, M: int = 3, **options) -> RecurrentQuantizer:
    torch.manual_seed(0)
    layer = RecurrentQuantizer(D, K, M, **options)
    layer.initialise(torch.randn(400, D) + 1, seed=0)
    return layer


LAYER = make_layer()
X = torch.randn(300, 5, generator=torch.Generator().manual_seed(1)) + 1


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("levels", [None, 1, 2])
def test_search_is_functional_search(metric, offset, levels):
    layer = make_layer(offset=offset)
    index = Index(layer, metric)
    assert index.add(X).tolist() == list(range(300))
    scores, ids = index.search(X[:20], k=30, levels=levels)
    expected = functional.search(
        X[:20], layer.encode(X), layer.codebook.detach(), layer.scale.detach(), k=30, metric=metric, levels=levels,
        offset=None if layer.offset is None else layer.offset.detach(), backend="torch",
    )  # fmt: skip
    assert torch.equal(ids, expected.positions)
    assert torch.equal(scores, expected.scores)


def test_blocks_of_queries_change_nothing(monkeypatch):
    index = Index(LAYER)
    index.add(X)
    whole = index.search(X[:50], k=7)
    monkeypatch.setattr(index_module, "_SCORES", 900)
    parts = index.search(X[:50], k=7)
    assert torch.equal(whole.ids, parts.ids)
    torch.testing.assert_close(whole.scores, parts.scores)


def test_answers_in_kind():
    index = Index(LAYER)
    assert isinstance(index.add(X.numpy()), np.ndarray)
    scores, ids = index.search(X[:3].numpy(), k=4)
    assert scores.dtype == np.float32
    assert ids.dtype == np.int64
    assert ids.shape == (3, 4)
    assert isinstance(index.encode(X.numpy()), np.ndarray)
    assert index.search(X[0], k=4).ids.tolist() == ids[0].tolist()
    assert index.search(X[:3].double().numpy(), k=4).ids.tolist() == ids.tolist()
    assert index.search(X[:0], k=4).ids.shape == (0, 4)


def test_training_on_does_not_change_the_index():
    layer = make_layer()
    index = Index(layer)
    index.add(X)
    before = index.search(X[:5])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    assert torch.equal(index.search(X[:5]).scores, before.scores)


def test_equal_codes_come_oldest_first_after_removal_too():
    index = Index(LAYER)
    index.add(X[:1].expand(8, 5), ids=[70, 10, 60, 20, 50, 30, 40, 0])
    assert index.search(X[0], k=8).ids.tolist() == [70, 10, 60, 20, 50, 30, 40, 0]
    index.remove([70, 60, 20, 30, 0])
    assert index.search(X[0], k=4).ids.tolist() == [10, 50, 40, -1]
    index.add(X[:1])
    assert index.search(X[0], k=4).ids.tolist() == [10, 50, 40, 71]


def test_removed_ids_are_not_given_out_again():
    index = Index(LAYER)
    index.add(X[:4])
    index.remove(torch.tensor([3, 2]))
    assert index.add(X[:2]).tolist() == [4, 5]
    index.remove([0, 1, 4, 5])
    assert len(index) == 0
    assert index.add(X[:1]).tolist() == [6]
    assert index.add(X[:1], ids=[2]).tolist() == [2]  # only by name


def test_keep_by_ids_and_by_mask():
    index = Index(LAYER)
    index.add(X, ids=torch.arange(300) * 2)
    wanted = [8, 400, 34, 13, 9999]  # 13 and 9999 are not there
    by_ids = index.search(X[:3], k=5, keep=wanted)
    assert torch.equal(index.search(X[:3], k=5, keep=np.array(wanted, np.uint16)).ids, by_ids.ids)
    assert all(set(row) == {8, 34, 400, -1} for row in by_ids.ids.tolist())
    mask = torch.zeros(599, dtype=torch.bool)
    mask[[8, 34, 400]] = True
    for flags in (mask, mask.numpy(), mask.tolist()):
        by_mask = index.search(X[:3], k=5, keep=flags)
        assert torch.equal(by_mask.ids, by_ids.ids)
        assert torch.equal(by_mask.scores, by_ids.scores)
    assert (index.search(X[:3], k=2, keep=[]).ids == -1).all()


def test_more_than_256_codewords_use_two_bytes(tmp_path):
    layer = make_layer(K=40000, M=2, init="random")
    index = Index(layer)
    index.add(X)
    assert index.codes.dtype == torch.int32
    assert torch.equal(index.codes, layer.encode(X))
    assert int(index.codes.max()) > 32767
    index.save(tmp_path / "a.drq")
    with safe_open(tmp_path / "a.drq", framework="pt") as file:
        assert file.get_tensor("codes").element_size() == 2
    other = Index.load(tmp_path / "a.drq")
    assert torch.equal(other.search(X[:9], k=5).ids, index.search(X[:9], k=5).ids)
    assert torch.equal(other.codes, index.codes)


def test_adding_codes():
    index, other = Index(LAYER), Index(LAYER)
    index.add(X, beam=4)
    other.add_codes(LAYER.encode(X, beam=4).numpy())
    assert torch.equal(index.codes, other.codes)


def test_adding_one_at_a_time_moves_the_arrays_rarely():
    index, addresses = Index(LAYER), set()
    for row in X:
        index.add(row[None])
        addresses.add(index._codes.data_ptr())
    assert len(index) == 300
    assert len(addresses) <= 12


def test_threads_may_search_add_and_remove_at_once():
    index = Index(LAYER)
    index.add(X)
    failures: list[BaseException] = []
    stop = threading.Event()

    def search() -> None:
        try:
            while not stop.is_set():
                scores, ids = index.search(X[:4], k=5)
                assert (scores.diff(dim=1) >= 0).all()
                assert (ids >= 0).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(60):
        ids = index.add(X[:50])
        if round_ % 2:
            index.remove(ids)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(index) == 300 + 30 * 50
    other = Index(LAYER)
    other.add_codes(index.codes, ids=index.ids)
    assert torch.equal(other.search(X[:9], k=20).ids, index.search(X[:9], k=20).ids)


def test_deepcopy_and_pickle():
    index = Index(LAYER)
    index.add(X)
    for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert torch.equal(other.search(X[:5]).ids, index.search(X[:5]).ids)
        other.add(X[:1])
        assert len(other) == len(index) + 1


def test_the_highest_id():
    index = Index(LAYER)
    index.add(X[:1], ids=[2**62 - 1])
    with pytest.raises(ValueError, match="add: ids must be given, since the highest one is in use, got None"):
        index.add(X[:1])
    index.remove([2**62 - 1])


class Model(RuleBasedStateMachine):
    """Any sequence of operations, beside a Python list that does the same the slow way."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.rows, self.next_id = Index(LAYER), [], 0

    @rule(rows=st.lists(st.integers(0, 299), max_size=5))
    def add(self, rows: list[int]) -> None:
        ids = self.index.add(X[rows]).tolist()
        assert ids == list(range(self.next_id, self.next_id + len(rows)))
        self.rows += list(zip(ids, rows, strict=True))
        self.next_id += len(rows)

    @rule(row=st.integers(0, 299), number=st.integers(0, 30))
    def add_with_id(self, row: int, number: int) -> None:
        if number in dict(self.rows):
            with pytest.raises(ValueError, match="which is in the index already"):
                self.index.add(X[[row]], ids=[number])
        else:
            self.index.add(X[[row]], ids=[number])
            self.rows.append((number, row))
            self.next_id = max(self.next_id, number + 1)

    @precondition(lambda self: self.rows)
    @rule(choice=st.data())
    def remove(self, choice: st.DataObject) -> None:
        ids = choice.draw(st.lists(st.sampled_from(sorted(dict(self.rows))), unique=True))
        self.index.remove(ids)
        self.rows = [pair for pair in self.rows if pair[0] not in ids]

    @invariant()
    def same_as_the_list(self) -> None:
        assert len(self.index) == len(self.rows)
        assert self.index.ids.tolist() == [number for number, _ in self.rows]
        codes = LAYER.encode(X[[row for _, row in self.rows]])
        assert torch.equal(self.index.codes, codes)
        result = self.index.search(X[:2], k=3)
        parameters = (LAYER.codebook.detach(), LAYER.scale.detach())
        expected = functional.search(X[:2], codes, *parameters, k=3, offset=LAYER.offset.detach(), backend="torch")
        ids = [[self.rows[p][0] if p >= 0 else -1 for p in row] for row in expected.positions.tolist()]
        assert result.ids.tolist() == ids
        assert torch.equal(result.scores, expected.scores)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


@pytest.fixture
def saved(tmp_path):
    index = Index(LAYER, "cosine")
    index.add(X, ids=torch.arange(300).flip(0) * 3)
    index.remove([9, 30])
    index.save(tmp_path / "a.drq")
    return index, tmp_path / "a.drq"


@pytest.mark.parametrize("mmap", [False, True])
def test_save_and_load(saved, mmap):
    index, path = saved
    other = Index.load(path, mmap=mmap)
    assert repr(other) == repr(index) == "Index(298 vectors of 5 dimensions in 12 bits, metric='cosine')"
    for levels in (1, 2, 3):
        a, b = index.search(X[:9], levels=levels), other.search(X[:9], levels=levels)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.scores, b.scores)
    other.verify()
    assert other.add(X[:1]).tolist() == index.add(X[:1]).tolist() == [898]
    other.remove([898])
    other.save(path)  # over the file that it came from
    assert torch.equal(Index.load(path).ids, other.ids)
    assert [p.name for p in path.parent.iterdir()] == ["a.drq"]


def rewrite(path, change_tensors=lambda t: None, change_header=lambda h: None, fix_checksums=True):
    """The same file with other contents."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        header = file.metadata()
    change_tensors(tensors)
    if fix_checksums:
        header["checksums"] = json.dumps({name: checksum(t) for name, t in tensors.items()})
    change_header(header)
    save_file(tensors, path, metadata=header)


def test_flipped_bits_are_noticed(saved):
    _, path = saved
    whole = path.read_bytes()
    for name, on_load in (("codes", False), ("ids", True), ("codebook", True), ("offset", True), ("scale", True)):
        path.write_bytes(whole)
        rewrite(path, lambda t, name=name: t[name].view(torch.uint8).flatten()[5].bitwise_xor_(1), fix_checksums=False)
        with pytest.raises(FileError, match=f"is corrupted \\(checksum of '{name}' does not match\\)"):
            Index.load(path)
        if on_load:
            with pytest.raises(FileError, match="is corrupted"):
                Index.load(path, mmap=True)
        else:
            index = Index.load(path, mmap=True)
            with pytest.raises(FileError, match="is corrupted"):
                index.verify()
            with pytest.raises(FileError, match="is corrupted"):
                index.add(X)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("mmap", [False, True])
def test_truncated_files_are_refused(saved, keep, mmap):
    _, path = saved
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(FileError, match="is not a whole safetensors file"):
        Index.load(path, mmap=mmap)


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        (
            lambda t: None,
            lambda h: h.update(version="2"),
            "has format version 2, newer than the 1 that this drq_fast reads",
        ),
        (lambda t: None, lambda h: h.update(version="x"), "is corrupted (its version is 'x')"),
        (lambda t: None, lambda h: h.update(kind="somebody.else"), "was not written by drq_fast"),
        (lambda t: None, lambda h: h.clear(), "was not written by drq_fast"),
        (lambda t: None, lambda h: h.update(kind="drq_fast.quantizer"), "holds a quantizer, not a index"),
        (lambda t: None, lambda h: h.update(config="[]"), "is corrupted"),
        (lambda t: None, lambda h: h.update(config="{}"), "does not describe an index"),
        (lambda t: None, lambda h: h.update(checksums="{}"), "is corrupted"),
        (
            lambda t: None,
            lambda h: h.update(config=h["config"].replace("cosine", "manhattan")),
            "metric must be one of",
        ),
        (lambda t: None, lambda h: h.update(version="9" * 5000), "is corrupted"),
        (lambda t: None, lambda h: h.update(version="0"), "is corrupted"),
        (lambda t: None, lambda h: h.update(config="[" * 100_000), "is corrupted"),
        (
            lambda t: None,
            lambda h: h.update(config=h["config"].replace("898", str(2**63))),
            "next_id must be an integer",
        ),
        (lambda t: t.update(more=t["ids"].clone()), lambda h: None, "tensors must be codebook, scale, codes, ids"),
        (lambda t: t.update(codebook=t["codebook"].double()), lambda h: None, "codebook must be torch.float32"),
        (lambda t: t.pop("codes"), lambda h: None, "does not describe an index"),
        (
            lambda t: t.update(codes=t["codes"].long()),
            lambda h: None,
            "codes must be torch.uint8 [N, 3], got torch.int64",
        ),
        (lambda t: t.update(codes=t["codes"][:, :2].clone()), lambda h: None, "codes must be torch.uint8 [N, 3]"),
        (lambda t: t["codes"].fill_(16), lambda h: None, "codes must be in 0..15"),
        (lambda t: t.update(ids=t["ids"][:-1].clone()), lambda h: None, "ids must be torch.int64 [298]"),
        (lambda t: t["ids"].fill_(5), lambda h: None, "ids must be unique"),
        (lambda t: t["ids"][0].fill_(-5), lambda h: None, "ids must be unique"),
        (lambda t: t.update(scale=t["scale"][:2].clone()), lambda h: None, "codes must be torch.uint8 [N, 2]"),
        (lambda t: t.update(codebook=t["codebook"][:, :4].clone()), lambda h: None, "offset must be [4]"),
        (lambda t: t["codebook"][0, 0].fill_(float("nan")), lambda h: None, "codebook must be finite"),
        (lambda t: t["scale"][1].fill_(float("inf")), lambda h: None, "scale must be finite"),
    ],
)
def test_foreign_newer_and_inconsistent_files_are_refused(saved, tensors, header, message):
    _, path = saved
    rewrite(path, tensors, header)
    with pytest.raises(FileError) as caught:
        Index.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_codes_out_of_range_in_a_mapped_file_never_reach_a_scan(saved):
    _, path = saved
    rewrite(path, lambda t: t["codes"].fill_(200))  # K is 16
    index = Index.load(path, mmap=True)
    with pytest.raises(ValueError, match=r"search: codes must be in 0..15, got values from 200 to 200\."):
        index.search(X[:1])


def test_mapped_codes_stay_on_disk_until_used(tmp_path):
    MEGABYTES = 256
    index = Index(make_layer(K=256, M=64, init="random"))
    index.add_codes(torch.zeros(MEGABYTES << 14, 64, dtype=torch.uint8))
    index.save(tmp_path / "a.drq")
    script = (
        "import resource, sys, drq_fast\n"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() >> 20\n"
        "before = rss(); index = drq_fast.Index.load(sys.argv[1], mmap=True); print(rss() - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.drq")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < MEGABYTES // 2


def test_unreadable_and_unwritable_paths(tmp_path):
    index = Index(LAYER)
    with pytest.raises(FileNotFoundError, match=r"load: .*missing.drq cannot be read"):
        Index.load(tmp_path / "missing.drq")
    with pytest.raises(OSError, match=r"load: .* cannot be read"):
        Index.load(tmp_path)
    with pytest.raises(OSError, match=r"save: .*folder/a.drq cannot be written"):
        index.save(tmp_path / "folder" / "a.drq")


def test_disk_full_while_saving_keeps_the_old_file(saved):
    index, path = saved
    before = path.read_bytes()
    index.add(X.repeat(100, 1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"save: .* cannot be written"):
            index.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.drq"]
    assert len(Index.load(path)) == 298


NAN = X[:2].clone().index_fill_(0, torch.tensor([1]), float("nan"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: Index(LAYER, "manhattan"), "Index: metric must be one of 'l2', 'ip', 'cosine', got 'manhattan'."),
        (lambda i: i.add(X[:, :4]), "add: x must be [N, 5], got [300, 4]."),
        (lambda i: i.add(X[0]), "add: x must be [N, 5], got [5]."),
        (lambda i: i.add(NAN), "add: x must be finite, got NaN or infinity in row 1."),
        (lambda i: i.add(NAN.numpy()), "add: x must be finite, got NaN or infinity in row 1."),
        (lambda i: i.add(X[:2], ids=[1]), "add: ids must be 2 numbers, one per vector, got 1."),
        (lambda i: i.add(X[:2], ids=[500, 500]), "add: ids must be unique, got 500 more than once."),
        (lambda i: i.add(X[:2], ids=[500, 7]), "add: ids must be new, got 7, which is in the index already."),
        (lambda i: i.add(X[:1], ids=[-1]), "add: ids must be an integer from 0 to 4611686018427387903, got -1."),
        (lambda i: i.add_codes(torch.full((1, 3), 16)), "add_codes: codes must be in 0..15, got values from 16 to 16."),
        (lambda i: i.add_codes(torch.zeros(1, 2, dtype=torch.uint8)), "add_codes: codes must be [N, 3], got [1, 2]."),
        (lambda i: i.search(X[:, :4]), "search: query must be [N, 5], got [300, 4]."),
        (lambda i: i.search(NAN), "search: query must be finite, got NaN or infinity in row 1."),
        (lambda i: i.search(X, k=0), "search: k must be an integer of at least 1, got 0."),
        (lambda i: i.search(X, k=-3), "search: k must be an integer of at least 1, got -3."),
        (lambda i: i.search(X, levels=0), "search: levels must be an integer from 1 to 3, got 0."),
        (lambda i: i.search(X, levels=4), "search: levels must be an integer from 1 to 3, got 4."),
        (lambda i: i.search(X, keep=[True] * 9), "search: keep must be [20] or longer, one per id, got [9]."),
        (lambda i: i.search(X, keep=[[1]]), "search: keep must be [n], got [1, 1]."),
        (lambda i: i.remove([3, 77]), "remove: ids must be in the index, got 77, which is not."),
        (lambda i: i.remove([3, 3]), "remove: ids must be unique, got 3 more than once."),
    ],
)  # fmt: skip
def test_bad_values_change_nothing(call, message):
    index = Index(LAYER)
    index.add(X[:20])
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is compared below, to the letter)
        call(index)
    assert str(caught.value) == message
    assert index.ids.tolist() == list(range(20))
    assert index.add(X[:1]).tolist() == [20]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: Index(torch.nn.Linear(2, 2)), "Index: layer must be a RecurrentQuantizer, got Linear."),
        (lambda i: i.add(X.int()), "add: x must be a float tensor, got torch.int32."),
        (lambda i: i.add([[1.0]]), "add: x must be a torch.Tensor or a numpy array, got list."),
        (lambda i: i.add(np.array([["a"]])), "add: x must be an array that torch can read, got <U1"),
        (lambda i: i.add(X[:1], ids=torch.tensor([0.5])), "add: ids must be an integer tensor, got torch.float32."),
        (lambda i: i.add(X[:1], ids=[9.7]), "add: ids must be an integer tensor, got torch.float64."),
        (lambda i: i.add(X[:1], ids=[True]), "add: ids must be an integer tensor, got torch.bool."),
        (lambda i: i.remove(5), "remove: ids must be a list, an array or a tensor of ids, got 5."),
        (lambda i: i.search(X, keep=[1.5]), "search: keep must be an integer tensor, got torch.float64."),
        (lambda i: i.search(X, k=1.5), "search: k must be an integer of at least 1, got 1.5."),
        (lambda i: i.search(X, k=True), "search: k must be an integer of at least 1, got True."),
        (lambda i: i.search(X, keep=torch.ones(20)), "search: keep must be an integer tensor, got torch.float32."),
    ],
)
def test_bad_types(call, message):
    index = Index(LAYER)
    with pytest.raises(TypeError) as caught:
        call(index)
    assert str(caught.value).startswith(message)


def test_an_uninitialised_layer_makes_no_index():
    with pytest.raises(RuntimeError, match="Index: the layer has not seen data yet"):
        Index(RecurrentQuantizer(5))
