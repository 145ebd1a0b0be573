"""Tensors to pointers: the only caller of the compiled extension `_C`."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import reference

Result = TypeVar("Result")

MAX_CODEWORDS = 8192  # up to which `encode` forms their inner products
_TILE = 1 << 20  # floats of a tile that stays in cache
_MIN_ROWS = 64  # fewer are not worth a thread
_QUERIES = 64  # that a scan takes at a time

extension: ModuleType | None
_import_error = ""
try:
    from . import _C

    extension = _C
except ImportError as error:
    extension = None
    _import_error = str(error)


def why_not(device: str) -> str | None:
    """The reason why the extension cannot work on a device of this type, or None if it can."""
    if extension is None:
        if any(Path(__file__).parent.glob("_C.*.so")):
            return f"the extension does not load ({_import_error})"
        if Path(__file__).parent.with_name("setup.py").exists():
            return "the extension is not built; run `pip install -e .` in the source tree"
        return "it was installed without a C++ compiler; install one, then reinstall drq_fast"
    if device == "cpu":
        return None
    if device == "cuda":
        if not extension.cuda:
            return "the extension was built without CUDA; reinstall with DRQ_FAST_CUDA=1 and nvcc at hand"
        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    return f"the extension has no code for {device}"


def lookup(table: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """`reference.lookup` for float32: sums [Q, N] from table [Q, K], codes [N, M] in 0..K-1 and scale [M]."""
    assert extension is not None
    table, scale = table.contiguous(), scale.contiguous()
    codes = codes.contiguous() if codes.dtype in (torch.uint8, torch.int32) else codes.to(torch.int32).contiguous()
    (Q, K), (N, M) = table.shape, codes.shape
    sums = torch.empty(Q, N, dtype=torch.float32, device=table.device)
    wide = codes.dtype == torch.int32
    pointers = {"table": table.data_ptr(), "scale": scale.data_ptr(), "codes": codes.data_ptr()}
    job = extension.Lookup(**pointers, sums=sums.data_ptr(), Q=Q, N=N, K=K, M=M, wide=wide)
    if table.device.type == "cpu":
        extension.lookup_cpu(job, threads=torch.get_num_threads())
    else:
        with torch.cuda.device(table.device):
            extension.lookup_cuda(job, stream=torch.cuda.current_stream().cuda_stream)
    return sums


_METRICS = {"l2": 0, "ip": 1, "cosine": 2}
_PRODUCT = 1 << 26  # multiplications from which a product is worth threads
_TINY = 1 << 18  # multiplications up to which torch uses none
_KEYS = 1 << 22  # results [queries, k] that are merged at a time
_LARGE = 1 << 22  # bytes for which large pages pay


def scan(
    prepared: reference.Prepared,
    codes: Tensor,
    scale: Tensor,
    scores: Tensor,
    positions: Tensor,
    metric: str,
    norms: Tensor | None = None,
    keep: Tensor | None = None,
    threads: int = 1,
) -> None:
    """Fills scores [Q, k] and positions [Q, k] int64 with the best codes by score and position.

    All in float32; codes [N, M] uint8, or two-byte codes in int16, rows perhaps apart; scale [M]; norms [N] for l2 and
    cosine; keep [N] bool. On a GPU it is enqueued.
    """
    assert extension is not None
    table = prepared.table.contiguous()
    (Q, K), (N, M) = table.shape, codes.shape
    job = {
        "table": table.data_ptr(),
        "scale": scale.data_ptr(),
        "codes": codes.data_ptr(),
        "norms": 0 if norms is None else norms.data_ptr(),
        "constants": prepared.constants.data_ptr(),
        "lengths": 0 if prepared.lengths is None else prepared.lengths.data_ptr(),
        "keep": 0 if keep is None else keep.data_ptr(),
        "scores": scores.data_ptr(),
        "positions": positions.data_ptr(),
        "Q": Q,
        "N": N,
        "K": K,
        "M": M,
        "k": scores.shape[1],
        "stride": codes.stride(0) if N > 1 else M,
        "metric": _METRICS[metric],
        "wide": codes.dtype == torch.int16,
    }
    if table.device.type == "cpu":
        extension.search_cpu(extension.Search(**job), isa=instruction_set(), threads=threads)
    else:
        _search_cuda(job, table.device)


def search(
    query: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    k: int,
    offset: Tensor | None = None,
    metric: str = "l2",
    norms: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.search` in float32, without a gradient and with norms given: (scores [Q, k], positions [Q, k])."""
    assert extension is not None
    device, Q = query.device, len(query)
    codebook, scale, codes = codebook.float().contiguous(), scale.float().contiguous(), _dense_rows(codes)
    offset = None if offset is None else offset.float()
    norms = None if norms is None or metric == "ip" else norms.float().contiguous()
    scores = torch.empty(Q, k, dtype=torch.float32, device=device)
    positions = torch.empty(Q, k, dtype=torch.int64, device=device)
    if device.type == "cpu" and positions.nbytes > _LARGE:
        for results in (scores, positions):
            extension.large_pages(results.data_ptr(), results.nbytes)
    # The scan has threads of its own. A product with the codebook that is worth threads is shared out around it; others
    # must not leave threads of torch's spinning on cores that the scan needs.
    product, threads = Q * codebook.numel(), torch.get_num_threads()
    apart = device.type == "cpu" and product > _PRODUCT and Q >= 2 * _QUERIES and threads > 1
    in_pool = device.type == "cpu" and not apart and product > _TINY
    step = max(1, min(16 * _QUERIES, _KEYS // k, _KEYS // len(codebook)))
    few = None
    if keep is not None and Q >= _QUERIES // 2:
        few = _alone(functools.partial(_few_rows, keep), device.type == "cpu")
    if few is not None:
        codes, norms, keep = codes[few], None if norms is None else norms[few], None
    keep = None if keep is None else keep.contiguous()

    def work(part: int, rows: slice) -> None:
        for here in tiles(rows, step):
            some = (query, scores, positions) if here == slice(0, Q) else (query[here], scores[here], positions[here])
            prepare = functools.partial(reference.prepare, some[0].float(), codebook, offset, metric)
            scan(_alone(prepare, in_pool), codes, scale, *some[1:], metric, norms, keep, 1 if apart else threads)

    if apart:
        in_threads(work, Q, _QUERIES)
    else:
        work(0, slice(0, Q))
    if few is not None and len(few):
        positions = few[positions.clamp_min(0)].where(positions >= 0, -1)
    return scores, positions


def _few_rows(keep: Tensor) -> Tensor | None:
    """The rows that a filter [N] keeps, None if they are half of all or more; many queries had better scan few rows."""
    return None if 2 * int(keep.count_nonzero()) >= len(keep) else keep.nonzero().squeeze(1)


def squared_norms(codes: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """`reference.squared_norms` in float32, the same bits; two-byte codes in int16."""
    assert extension is not None
    codebook, scale, codes = codebook.float(), scale.float().contiguous(), _dense_rows(codes)
    gram = _gram(codebook)
    (N, M), K = codes.shape, len(codebook)
    inner = None if offset is None else 2 * (codebook @ offset.float())
    norms = floats(N)
    job = extension.Norms(
        gram=gram.data_ptr(),
        scale=scale.data_ptr(),
        inner=0 if inner is None else inner.data_ptr(),
        constant=0.0 if offset is None else float(offset.float() @ offset.float()),
        codes=codes.data_ptr(),
        norms=norms.data_ptr(),
        N=N,
        K=K,
        M=M,
        stride=codes.stride(0) if N > 1 else M,
        wide=codes.dtype == torch.int16,
    )
    extension.norms_cpu(job, threads=torch.get_num_threads())
    return norms


def _dense_rows(codes: Tensor) -> Tensor:
    """codes [N, M] of any integer dtype as uint8, or as the bits of uint16 in int16; rows may lie apart."""
    if codes.dtype not in (torch.uint8, torch.int16):
        codes = codes.to(torch.int16)
    return codes if codes.stride(1) == 1 or codes.shape[1] == 1 else codes.contiguous()


class Codec:
    """A codec as the level kernels want it: K padded to P, a multiple of 16, in float32."""

    def __init__(self, codebook: Tensor, scale: Tensor) -> None:
        self.K, self.D = codebook.shape
        self.P = -(-self.K // 16) * 16
        self.M = len(scale)
        self.scale = scale.float().contiguous()
        self.codebook = codebook.float().contiguous()
        if self.P > self.K:
            self.codebook = torch.nn.functional.pad(self.codebook, (0, 0, 0, self.P - self.K))
        self.gram = _gram_in_threads(self.codebook)
        self.diagonal = self.gram.diagonal().contiguous()
        self.bias = (self.scale * self.scale)[:, None] * self.diagonal
        self.bias[:, self.K :] = float("inf")

    def told(self, x: Tensor, scores: Tensor) -> dict[str, int]:
        """What the kernels are told of centred x [n, D] and its products with the codewords, scores [n, P]."""
        pointers = {name: getattr(self, name).data_ptr() for name in ("codebook", "gram", "diagonal", "bias", "scale")}
        pointers |= {"x": x.data_ptr(), "scores": scores.data_ptr()}
        return pointers | {"N": len(x), "K": self.K, "P": self.P, "D": self.D, "M": self.M}


def tile_of(job: dict[str, Any]) -> Any:
    """Takes the members of Levels and Tile out of a job."""
    assert extension is not None
    names = ("codebook", "gram", "diagonal", "bias", "scale", "K", "P", "D", "M")
    levels = extension.Levels(**{name: job.pop(name) for name in names})
    return extension.Tile(levels=levels, **{name: job.pop(name) for name in ("x", "scores", "N")})


def training_of(**job: Any) -> tuple[Any, str]:
    """A job of `_training` and its instruction set."""
    assert extension is not None
    isa = job.pop("isa")
    first = {name: job.pop(name) for name in ("gamma", "codes", "squared_norms", "residuals", "soft")}
    training = extension.Training(tile=tile_of(job), **first)
    for name, value in job.items():
        setattr(training, name, value)
    return training, isa


def centred(x: Tensor, offset: Tensor | None) -> Tensor:
    """x [n, D] - offset, float32 and contiguous; x itself where it is that already."""
    return (x.float() if offset is None else x.float() - offset.float()).contiguous()


_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()
_forked = False


def _after_fork() -> None:
    """A child has no threads but its own, and torch's OpenMP waits for those of the parent for ever.

    A lock that another thread held would stay locked.
    """
    global _forked, _pools_lock
    _pools.clear()
    _pools_lock = threading.Lock()
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch computes with one thread each.

    Made at the first use and kept, because torch gives every thread that starts later what was set last, by whichever
    thread: while they are made, and only then, other threads that start get one thread, too.
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


def parts_of(N: int, least: int = _MIN_ROWS) -> int:
    """Into how many parts `in_threads` divides N rows."""
    return max(1, min(torch.get_num_threads(), N // least))


def in_threads(work: Callable[[int, slice], None], N: int, least: int = _MIN_ROWS) -> None:
    """work(part, rows) for parts of 0..N, one per thread of torch and of at least so many rows, each in its own thread.

    Within them torch computes with one thread. So a tile stays in the cache of one core, and nobody has to wait for
    threads of torch's that keep spinning after a matrix product. Interrupted, it waits for the `tiles` at hand.
    """
    threads, parts = torch.get_num_threads(), parts_of(N, least)
    if parts == 1:
        with torch.no_grad():
            work(0, slice(0, N))
    else:
        shares = [slice(N * part // parts, N * (part + 1) // parts) for part in range(parts)]
        interrupted = threading.Event()

        def run(part: int, rows: slice) -> None:
            _at_work.interrupted = interrupted
            work(part, rows)

        tasks: list[Future[None]] = []
        try:
            for part, rows in enumerate(shares):
                tasks.append(_submit(threads, functools.partial(run, part, rows)))
            for task in tasks:
                task.result()
        except BaseException:
            interrupted.set()
            wait(tasks)
            raise


class _AtWork(threading.local):
    """Set in a thread of ours once its work is of no use any more."""

    interrupted: threading.Event | None = None


_at_work = _AtWork()


def tiles(rows: slice, step: int) -> Iterator[slice]:
    """The rows, so many at a time; within `in_threads` no more of them once it was interrupted."""
    for first in range(rows.start, rows.stop, step):
        if _at_work.interrupted is not None and _at_work.interrupted.is_set():
            return
        yield slice(first, min(first + step, rows.stop))


def _gram(codebook: Tensor) -> Tensor:
    """C C^T; where it is small, not by threads of torch's, which a forked process does not have."""
    return _alone(lambda: codebook @ codebook.T, codebook.device.type == "cpu" and len(codebook) ** 2 <= _TINY)


def _gram_in_threads(codebook: Tensor) -> Tensor:
    """The same, for which threads of ours share out the rows where that pays."""
    K, D = codebook.shape
    if K * K > _TINY or K * K * D < _PRODUCT or K < 2 * _MIN_ROWS:
        return _gram(codebook)
    gram = floats(K, K)

    def work(_: int, rows: slice) -> None:
        torch.mm(codebook[rows], codebook.T, out=gram[rows])

    in_threads(work, K)
    return gram


def _alone(compute: Callable[[], Result], in_pool: bool) -> Result:
    """The result of compute(), by one thread if `in_pool` or forked, so that none of torch's are left spinning."""
    return _submit(1, compute).result() if in_pool or _forked else compute()


def _submit(threads: int, task: Callable[[], Result]) -> Future[Result]:
    """Runs a task in a pool of so many threads, without gradients."""
    inference = torch.is_inference_mode_enabled()

    def run() -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return task()

    return _pool(threads).submit(run)


def encode(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    beam: int = 1,
    level_weights: Tensor | None = None,
) -> Tensor:
    """`reference.encode` in float32 and score space: one product with the codebook, then additions only."""
    assert extension is not None
    codec = Codec(codebook, scale)
    omega = floats(codec.M).fill_(1) if level_weights is None else level_weights.float()
    still_to_come = reference.still_to_come(omega)
    codes = torch.empty(len(x), codec.M, dtype=torch.uint8 if codec.K <= 256 else torch.int32, device="cpu")
    native, isa, step = extension, instruction_set(), max(64, _TILE // max(codec.P, codec.D))

    def work(part: int, rows: slice) -> None:
        scores = floats(min(step, rows.stop - rows.start), codec.P)
        for here in tiles(rows, step):
            tile = centred(x[here], offset)
            torch.mm(tile, codec.codebook.T, out=scores[: len(tile)])
            job = native.Encode(
                tile=tile_of(codec.told(tile, scores)),
                omega=omega.data_ptr(),
                still_to_come=still_to_come.data_ptr(),
                codes=codes[here].data_ptr(),
                wide=codes.dtype == torch.int32,
                beam=beam,
            )
            native.encode_cpu(job, isa)

    in_threads(work, len(x))
    return codes


def instruction_set() -> str:
    """The widest that this processor has and the extension was compiled for; DRQ_FAST_ISA forces another."""
    supported = _supported_isas()
    forced = os.environ.get("DRQ_FAST_ISA")
    if forced and forced not in supported:
        raise ValueError(f"DRQ_FAST_ISA must be one of {', '.join(supported)} on this machine, got {forced!r}.")
    return forced or supported[-1]


@functools.cache
def _supported_isas() -> tuple[str, ...]:
    assert extension is not None
    return tuple(extension.supported_isas())


def floats(*shape: int) -> Tensor:
    """Uninitialised float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def cuda_versions() -> tuple[str, str] | None:
    """(CUDA runtime the extension was built with, CUDA the driver supports), or None without a CUDA build."""
    if extension is None or not extension.cuda:
        return None
    runtime, driver = extension.cuda_runtime_version(), extension.cuda_driver_version()
    return _dotted(runtime), _dotted(driver) if driver else "no driver"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _search_cuda(job: dict[str, int], device: torch.device) -> None:
    """Enqueues a search on the device's current stream; job: the members of `Search` in csrc/search.h."""
    assert extension is not None
    with torch.cuda.device(device):
        search = extension.Search(**job)
        workspace = torch.empty(extension.search_cuda_workspace(search), dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream().cuda_stream
        extension.search_cuda(search, workspace=workspace.data_ptr(), stream=stream)
