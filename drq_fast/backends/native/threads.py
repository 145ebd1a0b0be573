"""Threads in which torch computes with one thread each.

A tile of rows stays in the cache of one core, and no thread has to wait for torch's own OpenMP threads, which keep
spinning for milliseconds after every matrix product.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

_MIN_ROWS = 64  # fewer are not worth a thread
_NOTICE = 0.05  # seconds between two looks for Ctrl-C: a signal that arrives just before a wait does not end it


class _Pool:
    """Threads that run tasks, as many as were ever asked for; they are daemons, so that nothing waits for them."""

    growing = threading.Lock()  # of all pools: while one grows, torch's default is not what the user set
    calm = False  # whether `_calm_openmp` was called

    def __init__(self) -> None:
        self.size = 0
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends a thread

    def reach(self, size: int) -> None:
        """Starts the missing threads; there may be fewer where the process exits or has reached its limit."""
        # Another thread starts them, because Ctrl-C only interrupts the main thread.
        grower = threading.Thread(target=self._grow, args=(size,), name="drq_fast", daemon=True)
        try:
            grower.start()
        except RuntimeError:
            return
        while grower.is_alive():
            grower.join(_NOTICE)

    def _grow(self, size: int) -> None:
        """torch.set_num_threads also sets the number of every thread that starts later; this thread restores it."""
        with self.growing:
            default, ready = torch.get_num_threads(), SimpleQueue[None]()
            try:
                while self.size < size:
                    threading.Thread(target=self._serve, args=(ready,), name="drq_fast", daemon=True).start()
                    ready.get()
                    self.size += 1
            except RuntimeError:
                pass
            finally:
                torch.set_num_threads(default)

    def _serve(self, ready: SimpleQueue[None]) -> None:
        if not _Pool.calm:
            _Pool.calm = True
            _calm_openmp()
        torch.get_num_threads()  # else torch's first parallel loop in this thread would take the default again
        torch.set_num_threads(1)
        _current.is_ours = True
        ready.put(None)
        for task in iter(self.tasks.get, None):
            task()
            del task  # and the tensors it refers to


def _calm_openmp() -> None:
    """Lets this thread have OpenMP threads, too: with more of them than cores, libgomp's threads sleep after a loop.

    Else they spin for milliseconds, and threads of ours would have to share their cores with those of the caller.
    """
    torch.zeros(1 << 17, device="cpu").add_(1)


class _Call(Generic[Result]):
    """Tasks of one caller. Only the threads that run them count them: Ctrl-C in the caller cannot falsify a count."""

    def __init__(self, tasks: Sequence[Callable[[], Result]]) -> None:
        self.tasks, self.left = tasks, iter(range(len(tasks)))
        self.inference = torch.is_inference_mode_enabled()
        self.interrupted = False  # tells the tasks to end early
        self.running: set[int] = set()  # threads
        self.results: dict[int, Result] = {}
        self.errors: dict[int, BaseException] = {}
        self.news: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        """Runs tasks in this thread until none are left."""
        outer, _current.call, me, number = _current.call, self, threading.get_ident(), -1
        self.running.add(me)
        try:
            with torch.inference_mode(self.inference), torch.no_grad():
                for number in self.left:
                    if self.interrupted:
                        break
                    self.results[number] = self.tasks[number]()
        except BaseException as error:
            self.errors[number] = error
            self.interrupted = True
        finally:
            _current.call = outer
            self.running.discard(me)
            self.news.put(None)

    def run_in(self, pool: _Pool, threads: int) -> None:
        """Runs them in so many threads and waits; after an error or Ctrl-C only for those that are running."""
        try:
            for _ in range(threads):
                pool.tasks.put(self.run)
            while len(self.results) < len(self.tasks) and not self.errors:
                self._wait_for_news()
        finally:
            self.interrupted = True
            while self.running and len(self.results) < len(self.tasks):
                self._wait_for_news()

    def _wait_for_news(self) -> None:
        with suppress(Empty):
            self.news.get(timeout=_NOTICE)


class _Current(threading.local):
    """State of this thread: whether a pool started it, and the call whose tasks it runs."""

    is_ours = False
    call: _Call[Any] | None = None


_current = _Current()
_single, _many = _Pool(), _Pool()  # two, so that a short task does not wait behind another caller's long ones


def parts_of(N: int) -> int:
    """The number of parts into which `in_threads` divides N rows."""
    return max(1, min(torch.get_num_threads(), N // _MIN_ROWS))


def in_threads(work: Callable[[int, slice], None], N: int) -> None:
    """Calls work(part, rows) for parts of 0..N, one per thread of torch, each in a thread of its own.

    After an error or Ctrl-C it waits for the tiles at hand (see `tiles`), then raises.
    """
    parts = parts_of(N)
    if parts == 1:
        with torch.no_grad():
            work(0, slice(0, N))
        return
    bounds = [N * part // parts for part in range(parts + 1)]
    _run(_many, [functools.partial(work, part, slice(*bounds[part : part + 2])) for part in range(parts)], parts)


def tiles(rows: slice, step: int) -> Iterator[slice]:
    """The rows in slices of `step`; ends early where `in_threads` was interrupted."""
    call = _current.call
    for first in range(rows.start, rows.stop, step):
        if call is not None and call.interrupted:
            return
        yield slice(first, min(first + step, rows.stop))


def single_threaded(compute: Callable[[], Result]) -> Result:
    """compute() in one thread of ours, so that none of torch's are left spinning."""
    return _run(_single, [compute], 1)[0]


def in_parallel(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of all tasks, each run in one of our threads."""
    return _run(_many, tasks, min(torch.get_num_threads(), len(tasks)))


def _run(pool: _Pool, tasks: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """The results of all tasks, run in so many threads, without gradients and in the caller's inference mode.

    After an error or Ctrl-C no further task begins; it waits for those at hand, then raises.
    """
    call = _Call(tasks)
    if pool.size < threads and not _current.is_ours:
        pool.reach(threads)
    if pool.size == 0 or _current.is_ours:
        call.run()
    else:
        call.run_in(pool, threads)
    if call.errors:
        try:
            raise call.errors[min(call.errors)]
        finally:
            call.errors.clear()  # the traceback of an error refers to this frame
    return [call.results[number] for number in range(len(tasks))]


def _before_fork() -> None:
    """Ends the OpenMP threads of this thread, which libgomp in the child would wait for; torch starts them again."""
    if _openmp_can_pause:
        _openmp.omp_pause_resource_all(1)


def _in_child() -> None:
    """Forgets the pools, whose threads a child does not have."""
    global _single, _many
    _single, _many, _Pool.growing, _Pool.calm = _Pool(), _Pool(), threading.Lock(), False
    if not _openmp_can_pause and not _openmp_can_fork:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    _openmp = ctypes.CDLL(None)
    _openmp_can_fork = hasattr(_openmp, "__kmpc_fork_call")  # LLVM's and Intel's
    _openmp_can_pause = hasattr(_openmp, "omp_pause_resource_all") and not _openmp_can_fork  # GNU's from GCC 9
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
