"""Index: add, search at any prefix, remove and filter, by several threads and in every mode of torch."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drq_fast import Codec, Index, RecurrentQuantizer, functional
from drq_fast import index as index_module

METRICS = ["l2", "ip", "cosine"]


def make_layer(D: int = 5, K: int = 16, M: int = 3, **options) -> RecurrentQuantizer:
    torch.manual_seed(0)
    layer = RecurrentQuantizer(D, K, M, **options)
    layer.initialise(torch.randn(400, D) + 1, seed=0)
    with torch.no_grad():
        for parameter in (layer.codebook, layer.offset):
            if parameter is not None:
                parameter.copy_(coarse(parameter))
    return layer


def coarse(values: torch.Tensor) -> torch.Tensor:
    """Rounded to multiples of 1/32, whose products float32 adds up exactly: so the order of a sum does not matter."""
    return (values * 32).round() / 32


LAYER = make_layer()
X = coarse(torch.randn(300, 5, generator=torch.Generator().manual_seed(1)) + 1)


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
    assert index.add(X[:1], ids=[2]).tolist() == [2]  # a removed id can be used again only if it is given explicitly


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
    assert index._rows.codes.element_size() == 2
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
        addresses.add(index._rows.codes.data_ptr())
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


def test_threads_may_read_everything_while_rows_come_and_go():
    index = Index(LAYER)
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                assert len(index.ids.unique()) in (0, 20)
                assert len(index.codes) in (0, 20)
                assert len(index) in (0, 20)
                assert len(copy.deepcopy(index)) in (0, 20)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            index.remove(index.add(X[:20]))
    finally:
        stop.set()
        sys.setswitchinterval(interval)
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("metric", METRICS)
def test_autocast_changes_nothing(metric):
    expected, index = Index(LAYER, metric), Index(LAYER, metric)
    expected.add(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        index.add(X)
        inside = index.search(X[:5])
    for result in (inside, index.search(X[:5])):
        assert torch.equal(result.scores, expected.search(X[:5]).scores)


def test_an_index_from_inference_mode_lives_on_outside_it(tmp_path):
    Index(LAYER).save(tmp_path / "a.drq")
    with torch.inference_mode():
        made, loaded = Index(LAYER), Index.load(tmp_path / "a.drq", mmap=True)
        for index in (made, loaded):
            index.add(X[:20])
            index.search(X[:2])
    for index in (made, loaded):
        query = X[:2].clone().requires_grad_()
        index.search(query).scores.sum().backward()
        assert query.grad.isfinite().all()
        index.add(X[:3])
        index.remove([0, 1])
        assert index.add(X[:1]).tolist() == [23]


@pytest.mark.parametrize("change", ["add", "remove", "compact"])
def test_interrupted_changes_are_done_or_undone(monkeypatch, change):
    """Ctrl-C at any line of the change leaves the old rows or the new ones, searched as a fresh index would."""
    calls = {
        "add": lambda index: index.add(X[:30]),
        "remove": lambda index: index.remove([1]),
        "compact": lambda index: index.remove(list(range(15))),
    }
    sizes = {"add": {20, 50}, "remove": {19, 20}, "compact": {5, 20}}
    for line in range(1000):
        index = Index(LAYER)
        index.add(X[:20])
        index.search(X[:2])
        if not interrupted(calls[change], index, line):
            break
        assert len(index) == len(index.ids)
        assert len(index) in sizes[change]
        fresh = Index(LAYER)
        fresh.add_codes(index.codes, ids=index.ids)
        assert torch.equal(fresh.search(X[:2], k=60).ids, index.search(X[:2], k=60).ids)
        assert int(index.add(X[:1])) >= 20
    assert line > 10


def interrupted(change, index, after: int) -> bool:
    """Whether Ctrl-C came, `after` lines into index.py."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if Path(frame.f_code.co_filename).parent != Path(index_module.__file__).parent:
            return None
        if event == "line":
            lines += 1
            if lines > after:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        change(index)
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)


def test_deepcopy_and_pickle():
    index = Index(LAYER)
    index.add(X)
    for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert torch.equal(other.search(X[:5]).ids, index.search(X[:5]).ids)
        other.add(X[:1])
        assert len(other) == len(index) + 1


def test_the_highest_id():
    index = Index(LAYER)
    index.add(X[:1], ids=[2**62 - 2])
    assert index.add(X[:1]).tolist() == [2**62 - 1]
    assert index.add(X[:0]).tolist() == []
    with pytest.raises(
        ValueError, match="add: ids must be given, since there are too few above the highest one in use"
    ):
        index.add(X[:1])
    index.remove([2**62 - 1])


def test_ids_take_four_bytes_until_one_needs_more(tmp_path):
    index = Index(LAYER)
    index.add(X[:3], ids=[5, 2**31 - 1, 7])
    assert index._rows.ids.dtype is torch.int32
    assert index.ids.dtype is torch.int64
    with pytest.raises(ValueError, match=f"remove: ids must be in the index, got {2**31}, which is not"):
        index.remove([2**31])
    index.save(tmp_path / "index")
    assert Index.load(tmp_path / "index")._rows.ids.dtype is torch.int32
    index.add(X[3:5], ids=[2**31, 3])
    assert index._rows.ids.dtype is torch.int64
    assert index.ids.tolist() == [5, 2**31 - 1, 7, 2**31, 3]
    index.remove([2**31 - 1])
    index.save(tmp_path / "index")
    assert Index.load(tmp_path / "index").ids.tolist() == [5, 7, 2**31, 3]


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
BUSY = [HealthCheck.too_slow]  # on a busy machine, which says nothing about the index
TestModel.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=BUSY)


HUGE = torch.tensor([[1.0], [1e300]], dtype=torch.float64).expand(2, 5)
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
        (lambda i: i.search(X, k=0), "search: k must be an integer from 1 to 1048576, got 0."),
        (lambda i: i.search(X, k=-3), "search: k must be an integer from 1 to 1048576, got -3."),
        (lambda i: i.search(X, k=2**63), "search: k must be an integer from 1 to 1048576, got 9223372036854775808."),
        (lambda i: i.add(X, beam=5_000_000), "encode: beam must be an integer from 1 to 4096, got 5000000."),
        (lambda i: i.add(HUGE), "add: x must be finite in torch.float32, got NaN or infinity in row 1."),
        (
            lambda i: i.search(HUGE.numpy()),
            "search: query must be finite in torch.float32, got NaN or infinity in row 1.",
        ),
        (
            lambda i: i.add(X[:1], ids=np.array([2**64 - 1], np.uint64)),
            "add: ids must be below 2**63, got 18446744073709551615.",
        ),
        (lambda i: i.add(X[:2], ids=[-1, 2**70]), "add: ids must be below 2**63, got 1180591620717411303424."),
        (
            lambda i: Index(LAYER, np.array(["l2", "ip"])),
            "Index: metric must be one of 'l2', 'ip', 'cosine', got array(['l2', 'ip'], dtype='<U2').",
        ),
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
        (lambda i: Index(torch.nn.Linear(2, 2)), "Index: codec must be a Codec or a RecurrentQuantizer, got Linear."),
        (lambda i: i.add(X > 0), "add: x must be floats or integers, got bool."),
        (lambda i: i.add(X.cfloat()), "add: x must be floats or integers, got complex64."),
        (lambda i: i.add([["a"]]), "add: x must be numbers in lists of equal length, got others."),
        (lambda i: i.add(np.array([["a"]])), "add: x must be an array of numbers that torch can read, got <U1."),
        (lambda i: i.add(X[:1], ids=torch.tensor([0.5])), "add: ids must be integers, got float32."),
        (lambda i: i.add(X[:1], ids=[9.7]), "add: ids must be integers, got float64."),
        (lambda i: i.add(X[:1], ids=[True]), "add: ids must be integers, got bool."),
        (
            lambda i: i.add(np.ma.masked_array(X.numpy(), X.numpy() > 1)),
            "add: x must be an array without a mask, got a masked array.",
        ),
        (
            lambda i: i.add(X[:1], ids=np.ma.masked_array([1], [True])),
            "add: ids must be an array without a mask, got a masked array.",
        ),
        (lambda i: i.add(X.to_sparse()), "add: x must be a dense tensor, got torch.sparse_coo."),
        (
            lambda i: i.add(X, beam=np.array([1, 2])),
            "encode: beam must be an integer from 1 to 4096, got array([1, 2]).",
        ),
        (lambda i: i.remove(5), "remove: ids must be a list, an array or a tensor of ids, got 5."),
        (lambda i: i.search(X, keep=[1.5]), "search: keep must be integers, got float64."),
        (lambda i: i.search(X, k=1.5), "search: k must be an integer from 1 to 1048576, got 1.5."),
        (lambda i: i.search(X, k=True), "search: k must be an integer from 1 to 1048576, got True."),
        (lambda i: i.search(X, keep=torch.ones(20)), "search: keep must be integers, got float32."),
    ],
)  # fmt: skip
def test_bad_types(call, message):
    index = Index(LAYER)
    with pytest.raises(TypeError) as caught:
        call(index)
    assert str(caught.value).startswith(message)


def test_an_uninitialised_layer_makes_no_index():
    with pytest.raises(RuntimeError, match="Index: the layer has not seen data yet"):
        Index(RecurrentQuantizer(5))


def test_arrays_with_negative_strides():
    index = Index(RecurrentQuantizer(2, 4, 2, offset=False, init="random", gamma=1.0))
    index.add(np.ones((3, 2), "f4")[::-1])
    assert index.search(np.ones((1, 2), "f4")[::-1], k=1).ids.tolist() == [[0]]
    index.remove(np.array([1])[::-1])
    assert index.ids.tolist() == [0, 2]


def test_cosine_of_a_codec_that_encodes_lengths_warns_at_the_first_add():
    unit = torch.nn.functional.normalize(X, dim=1)
    index = Index(LAYER, "cosine")
    with pytest.warns(UserWarning, match="^add: the vectors differ in length, which a cosine ignores and this codec "):
        index.add(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index.add(X)  # said once
        Index(LAYER, "cosine").add(unit)
        Index(LAYER, "l2").add(X)
        codec = Codec(*LAYER.codec().tensors(), unit=True)
        Index(codec, "cosine").add(X)
