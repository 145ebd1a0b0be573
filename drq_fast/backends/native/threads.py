"""Threads in which torch computes with one thread each.

A tile of rows stays in the cache of one core, and no thread has to wait for torch's own OpenMP threads, which keep
spinning for milliseconds after every matrix product.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Result = TypeVar("Result")

_MIN_ROWS = 64  # fewer are not worth a thread

_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()
_forked = False


def _after_fork() -> None:
    """Forgets the pools: a child has none of its parent's threads, and a lock that was held would stay locked."""
    global _forked, _pools_lock
    _pools.clear()
    _pools_lock = threading.Lock()
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _pool(threads: int) -> ThreadPoolExecutor:
    """So many threads, made at the first use and kept.

    torch.set_num_threads sets the default of every thread that starts later, by whichever thread it is called. So the
    threads are started together, and the caller's setting is restored afterwards.
    """
    with _pools_lock:
        mine = torch.get_num_threads()
        for size in {1, threads} - _pools.keys():
            all_there = threading.Barrier(size + 1)
            pool = ThreadPoolExecutor(size, "drq_fast", initializer=torch.set_num_threads, initargs=(1,))
            for _ in range(size):
                pool.submit(all_there.wait)
            all_there.wait()
            torch.set_num_threads(mine)
            _pools[size] = pool
        return _pools[threads]


def parts_of(N: int) -> int:
    """The number of parts into which `in_threads` divides N rows."""
    return max(1, min(torch.get_num_threads(), N // _MIN_ROWS))


def in_threads(work: Callable[[int, slice], None], N: int) -> None:
    """Calls work(part, rows) for parts of 0..N, one per thread of torch, each in a thread of its own.

    After an error or Ctrl-C it waits for the tiles at hand (see `tiles`), then raises.
    """
    threads, parts = torch.get_num_threads(), parts_of(N)
    if parts == 1:
        with torch.no_grad():
            work(0, slice(0, N))
        return
    interrupted = threading.Event()

    def run(part: int) -> None:
        _current.interrupted = interrupted
        try:
            work(part, slice(N * part // parts, N * (part + 1) // parts))
        finally:
            _current.interrupted = None

    tasks: list[Future[None]] = []
    try:
        for part in range(parts):
            tasks.append(_submit(threads, functools.partial(run, part)))
        for task in tasks:
            task.result()
    except BaseException:
        interrupted.set()
        wait(tasks)
        raise


class _Current(threading.local):
    """The event that tells the work of this thread to end early."""

    interrupted: threading.Event | None = None


_current = _Current()


def tiles(rows: slice, step: int) -> Iterator[slice]:
    """The rows in slices of `step`; ends early where `in_threads` was interrupted."""
    for first in range(rows.start, rows.stop, step):
        if _current.interrupted is not None and _current.interrupted.is_set():
            return
        yield slice(first, min(first + step, rows.stop))


def single_threaded(compute: Callable[[], Result]) -> Result:
    """compute() in one thread of ours, so that none of torch's are left spinning."""
    return _submit(1, compute).result()


def in_parallel(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of all tasks, each run in one of our threads."""
    threads = torch.get_num_threads()
    futures = [_submit(threads, task) for task in tasks]
    try:
        return [future.result() for future in futures]
    except BaseException:
        wait(futures)
        raise


def without_dead_threads(compute: Callable[[], Result]) -> Result:
    """compute(); single-threaded in a forked process, where torch's OpenMP would wait for threads of the parent."""
    return single_threaded(compute) if _forked else compute()


def _submit(threads: int, task: Callable[[], Result]) -> Future[Result]:
    """Runs a task in a pool of so many threads, without gradients and in the caller's inference mode."""
    inference = torch.is_inference_mode_enabled()

    def run() -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return task()

    return _pool(threads).submit(run)
