"""What lies on a GPU, by its logic: numbers copied once, tiles from pinned memory, and streams that share an index."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import drq_fast
from drq_fast import devices

CPU = torch.device("cpu")


def test_numbers_are_copied_once():
    with torch.inference_mode():
        first = devices.tensor_of((1.0, 2.5), torch.float32, CPU)
    assert first.tolist() == [1.0, 2.5]
    assert devices.tensor_of((1.0, 2.5), torch.float32, CPU) is first
    assert devices.tensor_of((1.0, 2.5), torch.float64, CPU).dtype == torch.float64
    assert not first.is_inference()  # autograd may keep it
    assert devices.tensor_of(3.0, torch.float32, CPU).shape == ()


def test_tensors_of_a_trace_are_not_kept():
    with FakeTensorMode():
        assert type(devices.tensor_of((0.125, 7.0), torch.float32, CPU)) is not Tensor
    assert devices.tensor_of((0.125, 7.0), torch.float32, CPU).tolist() == [0.125, 7.0]


class LateCopies:
    """Streams and events of CUDA, whose copies happen only when the host waits for them: the latest that is allowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.events: list[Any] = []
        self.pinned = self.waited = self.kept = 0
        outer, empty = self, torch.empty

        class Event:
            def __init__(self) -> None:
                self.copies: list[tuple[Tensor, Tensor]] = []
                outer.events.append(self)

            def record(self, _: object) -> None:
                self.copies, outer.copies = outer.copies, []

            def synchronize(self) -> None:
                for to, source in self.copies:
                    to.copy_(source)
                self.copies = []

        class Stream:
            def __init__(self, *_: object) -> None: ...

            def wait_event(self, event: Event) -> None:
                outer.waited += len(event.copies)

        def pin(*shape: object, pin_memory: bool = False, **options: Any) -> Tensor:
            outer.pinned += pin_memory
            return empty(*shape, **options)

        def to(tensor: Tensor, _: object, non_blocking: bool = False) -> Tensor:
            assert non_blocking
            outer.copies.append((torch.full_like(tensor, -1), tensor))
            return outer.copies[-1][0]

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
        monkeypatch.setattr(torch, "empty", pin)
        monkeypatch.setattr(Tensor, "to", to)
        monkeypatch.setattr(Tensor, "record_stream", lambda *_: setattr(self, "kept", self.kept + 1))


@pytest.mark.parametrize("N", [1, 4, 5, 8, 31])
def test_tiles_come_from_two_pinned_buffers_that_are_not_filled_before_they_are_copied(monkeypatch, N):
    x = torch.arange(2.0 * N).view(N, 2).half()
    late = LateCopies(monkeypatch)
    tiles = list(devices.moved(x.split(4), torch.device("cuda"), torch.float32))
    for event in late.events:
        event.synchronize()
    assert torch.equal(torch.cat(tiles), x.float())
    assert late.pinned == min(2, len(tiles))
    assert late.waited == late.kept == len(tiles)


def test_tiles_in_place_are_not_copied():
    x = torch.ones(6, 2)
    assert [tile.data_ptr() for tile in devices.moved(x.split(3), CPU, torch.float32)] == [
        x.data_ptr(),
        x[3:].data_ptr(),
    ]


@pytest.fixture
def index(codec) -> drq_fast.Index:
    x, codebook, scale, offset = codec(N=60)
    index = drq_fast.Index(drq_fast.Codec(codebook, scale, offset), vectors="float16")
    index.add(x, ids=torch.arange(60) + 5)
    return index


def test_rows_are_written_before_other_streams_may_see_them(index, codec, monkeypatch):
    seen = []
    monkeypatch.setattr(devices, "finish", lambda _: seen.append((index._rows, dict(index._searched))))
    before = index._rows
    index.add(codec(N=3, seed=1).x)
    assert [rows is before for rows, _ in seen] == [True]
    seen.clear()
    index.search(codec(N=2).x, 4)
    assert [searched for _, searched in seen] == [{}]
    seen.clear()
    index.search(codec(N=2).x, 4)  # nothing new: the host does not wait
    assert seen == []
    index.remove([7])
    assert [rows.alive is not None and not rows.alive.all() for rows, _ in seen] == [False, True]


def test_memory_that_a_stream_reads_is_kept_until_it_has(index, codec, monkeypatch):
    read = []
    monkeypatch.setattr(devices, "read_here", lambda tensors, _: read.extend(t for t in tensors if t is not None))
    index.remove([8])
    index.search(codec(N=2).x, 4, refine=10)
    rows, database = index._rows, index._searched[index.levels].database
    wanted = [rows.codes, rows.content.vectors, rows.ids, rows.alive, database.norms, database.keep]
    found = {tensor.data_ptr() for tensor in read}
    assert found == {tensor.data_ptr() for tensor in wanted}
