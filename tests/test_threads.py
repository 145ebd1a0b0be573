"""Threads of the library: Ctrl-C, errors, forks, the end of the main thread, and how many there are."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from patience import PATIENCE, wait_until

from drq_fast import Index, RecurrentQuantizer
from drq_fast.backends.native import threads

TILES = 60_000  # of a hundredth of a second: what is interrupted would go on for ten minutes
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


@pytest.fixture(autouse=True)
def pools(monkeypatch) -> Iterator[None]:
    """New pools, and two threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    made = [threads._Pool(), threads._Pool()]
    monkeypatch.setattr(threads, "_single", made[0])
    monkeypatch.setattr(threads, "_many", made[1])
    yield
    torch.set_num_threads(before)
    for pool in made:
        for _ in range(pool.size):
            pool.tasks.put(None)


def nothing(part: int, rows: slice) -> None:
    pass


def ours() -> int:
    return sum(thread.name == "drq_fast" for thread in threading.enumerate())


def default_number() -> int:
    """torch's number of threads in a thread that starts now."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_one_pool_serves_every_number_of_threads():
    before = ours()
    for number in [*range(1, 20), 3]:
        torch.set_num_threads(number)
        ran: list[tuple[int, slice, int]] = []
        threads.in_threads(lambda *given, to=ran: to.append((*given, torch.get_num_threads())), 64 * 20)
        assert sorted(part for part, _, _ in ran) == list(range(number))
        assert sum(rows.stop - rows.start for _, rows, _ in ran) == 64 * 20
        assert number == 1 or {count for _, _, count in ran} == {1}
        assert threads.single_threaded(torch.get_num_threads) == 1
        assert torch.get_num_threads() == default_number() == number
    assert ours() - before <= 20


def test_tasks_use_no_more_threads_than_torch_may():
    torch.set_num_threads(8)
    threads.in_threads(nothing, 1 << 20)
    torch.set_num_threads(2)
    used = threads.in_parallel([lambda: time.sleep(0.002) or threading.get_ident()] * 16)
    assert len(set(used)) <= 2
    assert threads.in_parallel([lambda number=number: number for number in range(9)]) == list(range(9))
    assert threads.in_parallel([]) == []


def test_work_inside_of_work():
    assert threads.single_threaded(lambda: threads.single_threaded(lambda: 3)) == 3
    inner = lambda: threads.in_parallel([lambda: 4] * 5)  # noqa: E731
    assert threads.in_parallel([inner] * 5) == [[4] * 5] * 5


def test_what_a_task_refers_to_is_freed():
    x = torch.zeros(3)
    freed = weakref.ref(x)
    threads.single_threaded(lambda x=x: x.sum())
    del x
    wait_until(lambda: freed() is None)  # the thread waits for its next task
    assert freed() is None


def test_the_error_of_the_first_part_is_raised_and_ends_the_rest():
    both = threading.Barrier(2)

    class Marked(ValueError):
        pass

    def fail(part: int, rows: slice) -> None:
        both.wait()
        raise Marked(str(part))

    for _ in range(10):
        with pytest.raises(Marked) as caught:
            threads.in_threads(fail, 128)
        assert str(caught.value) == "0"
    begun: list[int] = []

    def first_fails(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise Marked
        time.sleep(0.01)

    with pytest.raises(Marked):
        threads.in_parallel([lambda number=number: first_fails(number) for number in range(100_000)])
    assert len(begun) < 100_000


def test_an_interruption_just_before_the_wait_is_noticed():
    """`interrupt_main` sends no signal, so that it ends no wait: as a signal that arrives just before one."""
    done, started = [0, 0], threading.Event()

    def work(part: int, rows: slice) -> None:
        for _ in threads.tiles(rows, 1):
            done[part] += 1
            started.set()
            time.sleep(0.01)

    def interrupt() -> None:
        started.wait()
        time.sleep(0.1)  # until the main thread waits
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        threads.in_threads(work, 2 * TILES)
    at_once = tuple(done)
    time.sleep(0.1)
    assert tuple(done) == at_once
    assert max(done) < TILES


def test_ctrl_c_at_any_line_leaves_working_threads(monkeypatch):
    for line in range(200):
        pool = threads._Pool()
        monkeypatch.setattr(threads, "_many", pool)
        came = interrupted(lambda: threads.in_threads(nothing, 128), line)
        parts: list[int] = []
        threads.in_threads(lambda part, rows, parts=parts: parts.append(part), 128)
        assert sorted(parts) == [0, 1]
        assert pool.size == 2
        assert torch.get_num_threads() == default_number() == 2
        for _ in range(2):
            pool.tasks.put(None)
        if not came:
            break
    assert 10 < line < 199


def interrupted(call: Callable[[], None], after: int) -> bool:
    """Whether Ctrl-C came, `after` lines into threads.py."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != threads.__file__:
            return None
        if event == "line":
            lines += 1
            if lines > after:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_work_is_done_where_no_thread_can_be_started(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert threads.in_parallel([lambda: 1, lambda: 2]) == [1, 2]
    assert threads.single_threaded(lambda: 3) == 3


def everything(index: Index, layer: RecurrentQuantizer, x: torch.Tensor) -> None:
    """Operations of all kinds, on tensors that are large enough for torch's own threads."""
    count = len(index)
    ids = index.add(x)
    assert len(index) == count + len(x)
    assert index.search(x[:100], k=3).ids.shape == (100, 3)
    assert index.search(x[:2], k=3, keep=ids).ids.shape == (2, 3)
    index.remove(ids)
    assert layer.decode(layer.encode(x)).shape == x.shape
    features = x.clone().requires_grad_()
    layer(features).loss.backward()
    assert features.grad.isfinite().all()
    RecurrentQuantizer(16, codewords=8, levels=2).fit(x, rounds=1)


def made() -> tuple[Index, RecurrentQuantizer, torch.Tensor]:
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    layer = RecurrentQuantizer(16, codewords=32, levels=2)
    layer.initialise(x)
    return Index(layer), layer, x


def child_ends_well(work: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(PATIENCE)  # where it hangs, it is killed
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@needs_fork
def test_a_child_computes_after_torch_used_its_own_threads():
    index, layer, x = made()
    everything(index, layer, x)
    square = torch.randn(600, 600)

    def torch_too() -> None:
        assert (square @ square).add(square).isfinite().all()

    torch_too()
    assert child_ends_well(lambda: everything(index, layer, x))
    torch_too()
    assert child_ends_well(lambda: (torch_too(), everything(index, layer, x)))
    assert torch.get_num_threads() == 2
    everything(index, layer, x)


@needs_fork
def test_a_child_computes_where_openmp_threads_cannot_be_ended(monkeypatch):
    monkeypatch.setattr(threads, "_openmp_can_pause", False)
    monkeypatch.setattr(threads, "_openmp_can_fork", False)
    index, layer, x = made()
    everything(index, layer, x)

    def work() -> None:
        assert torch.get_num_threads() == default_number() == 1
        everything(index, layer, x)

    assert child_ends_well(work)
    assert torch.get_num_threads() == 2


@needs_fork
def test_a_child_has_locks_of_its_own():
    index, layer, x = made()
    everything(index, layer, x)
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with index._lock, threads._Pool.growing:
            held.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert child_ends_well(lambda: everything(index, layer, x))
    finally:
        ended.set()
        thread.join()
    everything(index, layer, x)


LATE = """
import atexit, sys, threading, time
import torch
from drq_fast import Index, RecurrentQuantizer

torch.set_num_threads(2)
x = torch.randn(1000, 16)
layer = RecurrentQuantizer(16, codewords=32, levels=2)
layer.initialise(x)
index = Index(layer)
begin, done = threading.Event(), threading.Event()

def use(name):
    index.add(x)
    assert index.search(x[:100], k=3).ids.shape == (100, 3)
    torch.set_num_threads(2)
    assert index.search(x[:40], k=3, keep=index.add(x)[:9]).ids.shape == (40, 3)
    print(name, flush=True)

def daemon():
    threading.main_thread().join()
    begin.wait()
    use("daemon")
    done.set()

def thread():
    threading.main_thread().join()
    use("thread")
    begin.set()
    done.wait()

atexit.register(use, "atexit")
{early}
threading.Thread(target=daemon, daemon=True).start()
threading.Thread(target=thread).start()
"""


@pytest.mark.parametrize("early", ["", "use('main')"])
def test_threads_that_outlive_the_main_thread_compute(early):
    result = subprocess.run(
        [sys.executable, "-c", LATE.format(early=early)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.stderr == ""
    assert result.stdout.split() == (["main"] if early else []) + ["thread", "daemon", "atexit"]
    assert result.returncode == 0


START = """
import sys, threading
import torch
from drq_fast import RecurrentQuantizer
from drq_fast.backends.native import threads

x = torch.randn(64 * 40, 16)
layer = RecurrentQuantizer(16, codewords=32, levels=2)
torch.set_num_threads(1)
layer.initialise(x)
"""
EVERY_NUMBER = """
for number in range(1, 33):
    torch.set_num_threads(number)
    layer.encode(x)
print(threading.active_count())
"""
CTRL_C = """
def interrupted(after):
    def trace(frame, event, _):
        nonlocal after
        if frame.f_code.co_filename != threads.__file__:
            return None
        after -= event == "line"
        if after < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace
    return trace

for line in range(30):
    torch.set_num_threads(2 + line)  # so that threads have to be started
    sys.settrace(interrupted(line))
    try:
        layer.encode(x)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        sys.settrace(None)
"""


def test_every_number_of_threads_in_a_process_of_its_own():
    """Through public calls alone: 1 + 2 + ... + 32 threads were left."""
    done = subprocess.run(
        [sys.executable, "-c", START + EVERY_NUMBER], capture_output=True, text=True, timeout=PATIENCE
    )
    assert int(done.stdout) < 40, done.stderr


def test_a_process_ends_after_ctrl_c_while_threads_were_started():
    done = subprocess.run([sys.executable, "-c", START + CTRL_C], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("interrupted") > 10
