"""Scores and search by compiled code, on the CPU and on NVIDIA GPUs: the bits of plain torch, given the same tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import checks, modes
from .. import torch as definition
from ..gradients import refuse_second_derivatives
from ..torch import inverted
from ..types import Database, Lists, Parameters, SearchResult, Stored
from .extension import MAX_CODEWORDS, floats, instruction_set, native, pointer
from .norms import bases_of, dense_rows, squared_norms
from .threads import single_threaded

if TYPE_CHECKING:
    from ... import _C

_METRICS = {"l2": 0, "ip": 1, "cosine": 2}
_STORED = {torch.float32: 0, torch.float16: 1, torch.int8: 2}
_QUERIES = 1024  # queries of one call of the scan: Ctrl-C is noticed in between
_RESULTS = 1 << 22  # results [queries, k] of one call
_LARGE = 1 << 22  # bytes from which large pages pay
_PRODUCTS = 1 << 22  # products of queries and centroids that a GPU holds at a time
_FILTERED = 32  # queries from which it pays to copy the codes that a filter keeps, if they are less than half


_NO_POSITIONS = torch.empty(0, dtype=torch.int64, device="cpu")


class Columns:
    """A codec as the scan of the CPU takes it, float32: the codebook packed for products with queries."""

    def __init__(self, codec: Parameters) -> None:
        codebook, (T, D) = codec.codebook.float().contiguous(), codec.codebook.shape
        self.packed = floats(native.packed_size(T, D))
        native.pack_codebook(pointer(codebook), pointer(self.packed), T, D)
        self.scale, self.bases = codec.scale.float().contiguous(), bases_of(codec)
        self.offset = None if codec.offset is None else codec.offset.float().contiguous()
        self.job = native.Columns(
            columns=pointer(self.packed),
            scale=pointer(self.scale),
            bases=pointer(self.bases),
            offset=pointer(self.offset),
            K=codec.codewords,
            T=T,
            D=D,
        )


class Centroids:
    """The centroids of lists as the scan of the CPU takes them, float32: packed for products with queries."""

    def __init__(self, lists: Lists) -> None:
        centroids, (L, D) = lists.centroids.float().contiguous(), lists.centroids.shape
        self.packed, self.norms = floats(native.packed_size(L, D)), lists.table(inverted.centroid_norms).float()
        native.pack_codebook(pointer(centroids), pointer(self.packed), L, D)


class Scanned:
    """A database as the scan of the CPU takes it."""

    def __init__(self, database: Database) -> None:
        columns, codes, norms = database.codec.table(Columns), dense_rows(database.codes), _norms(database)
        keep = None if database.keep is None else database.keep.contiguous()
        self.tensors = columns, codes, norms, keep  # kept alive: the job has their addresses
        N, M = codes.shape
        self.job = native.Database(
            codec=columns.job,
            codes=pointer(codes),
            norms=pointer(norms),
            keep=pointer(keep),
            N=N,
            M=M,
            stride=codes.stride(0) if N > 1 else M,
            metric=_METRICS[database.metric],
            wide=codes.dtype is torch.int16,
        )
        self.probed: dict[int | None, _C.Lists] = {}  # by the number of lists that queries look at


def search(
    query: Tensor,
    database: Database,
    k: int,
    *,
    finite: bool = False,
    probes: int | None = None,
    limits: Tensor | None = None,
) -> SearchResult:
    """The k best codes for each query [Q, D]: see `backends.torch.search`; scores are differentiable once.

    limits [Q] float32: scores that are worse may be left out, which is faster.
    """
    if (query.requires_grad or database.requires_grad) and torch.is_grad_enabled():
        with torch.no_grad():
            found = search(query, database, k, finite=finite, probes=probes, limits=limits)
        return _with_gradient(query, database, found)
    if database.keep is None or not _copying_pays(database, query.shape[0]):
        return _scan(query, database, k, finite, probes, limits)
    rows, kept = database.table(_kept)
    scores, positions = _scan(query, kept, k, finite, probes, limits)
    return SearchResult(scores, rows[positions.clamp_min(0)].where(positions >= 0, -1) if len(rows) else positions)


def _scan(
    query: Tensor, database: Database, k: int, finite: bool, probes: int | None, limits: Tensor | None
) -> SearchResult:
    if query.device.type == "cpu":
        return _scan_cpu(query, database, k, finite, probes, limits)
    return _scan_cuda(query, database, k, finite, probes)


def _scan_cpu(
    query: Tensor, database: Database, k: int, finite: bool, probes: int | None, limits: Tensor | None
) -> SearchResult:
    """Products with the codebook are part of the scan, in a fixed order."""
    scanned, rows = database.table(Scanned), _dense_floats(query)
    job, lists = scanned.job, None
    if database.lists is not None:
        lists = scanned.probed.get(probes)
        if lists is None:
            lists = scanned.probed[probes] = _lists_job(database.lists, probes)
    Q, D = rows.shape
    scores, positions = rows.new_empty(Q, k), _NO_POSITIONS.new_empty(Q, k)
    query_at, scores_at, positions_at = rows.data_ptr(), scores.data_ptr(), positions.data_ptr()
    if 8 * Q * k > _LARGE:
        native.large_pages(scores_at, scores.nbytes)
        native.large_pages(positions_at, positions.nbytes)
    step = max(1, min(_QUERIES, _RESULTS // k))
    isa, threads = instruction_set(), torch.get_num_threads()
    ceilings = None if limits is None else _ceilings(limits, database.metric)
    for first in range(0, Q, step):
        count = min(step, Q - first)
        below = 0 if ceilings is None else ceilings.data_ptr() + 4 * first
        if lists is None:
            odd = native.search_cpu(job, query_at, scores_at, positions_at, count, k, isa, threads, below)
        else:
            odd = native.search_lists_cpu(job, lists, query_at, scores_at, positions_at, count, k, isa, threads, below)
        if odd >= 0 and finite:
            checks.finite("search", "query", query, torch.float32)
        query_at += 4 * count * D
        scores_at += 4 * count * k
        positions_at += 8 * count * k
    return SearchResult(scores, positions)


def _ceilings(limits: Tensor, metric: str) -> Tensor:
    """What costs must stay below so that scores are not worse than limits [Q]."""
    costs = limits if metric == "l2" else 0 - limits
    return torch.nextafter(costs, torch.full_like(costs, float("inf"))).contiguous()


def refine(query: Tensor, positions: Tensor, stored: Stored, metric: str, k: int) -> SearchResult:
    """The k best of the candidates at positions [Q, n], by the stored vectors: see `backends.torch.refine`."""
    rows, positions = _dense_floats(query), positions.contiguous()
    values, (Q, n) = stored.values.contiguous(), positions.shape
    scores, found = rows.new_empty(Q, k), _NO_POSITIONS.new_empty(Q, k)
    job = native.Refine(
        queries=rows.data_ptr(),
        candidates=positions.data_ptr(),
        vectors=values.data_ptr(),
        steps=pointer(stored.steps),
        scores=scores.data_ptr(),
        positions=found.data_ptr(),
        Q=Q,
        n=n,
        k=k,
        D=rows.shape[1],
        metric=_METRICS[metric],
        stored=_STORED[values.dtype],
    )
    native.refine_cpu(job, instruction_set(), torch.get_num_threads())
    return SearchResult(scores, found)


def _lists_job(lists: Lists, probes: int | None, products: Tensor | None = None) -> _C.Lists:
    """The job must not outlive the lists and the products [Q, L]."""
    L, centroids = len(lists), lists.table(Centroids)
    return native.Lists(
        starts=lists.starts.data_ptr(),
        columns=centroids.packed.data_ptr(),
        norms=centroids.norms.data_ptr(),
        products=pointer(products),
        L=L,
        probes=L if probes is None else min(probes, L),
    )


@torch.no_grad()
def _scan_cuda(query: Tensor, database: Database, k: int, finite: bool, probes: int | None) -> SearchResult:
    """The same on a GPU: enqueued on the current stream, with products by torch; with lists, some queries at a time."""
    if finite:
        checks.finite("search", "query", query, torch.float32)
    codec, metric, lists = database.codec, database.metric, database.lists
    codes, norms, scale = dense_rows(database.codes), database.table(_norms), codec.scale.float().contiguous()
    keep, bases = None if database.keep is None else database.keep.contiguous(), codec.table(bases_of)
    codebook, offset = codec.codebook.float(), None if codec.offset is None else codec.offset.float()
    scores = torch.empty(len(query), k, dtype=torch.float32, device=query.device)
    positions = torch.empty(len(query), k, dtype=torch.int64, device=query.device)
    step = max(1, _PRODUCTS // len(lists) if lists else len(query))
    for some, own_scores, own in zip(query.float().split(step), scores.split(step), positions.split(step), strict=True):
        with modes.precise("cuda"):
            prepared, probed = definition.prepare(some, codebook, offset, metric), None
            if lists:
                products = inverted.products_of(some, lists.centroids.float(), offset, metric)
                constants, *chosen = inverted.probed_lists(products, prepared.constants, lists, metric, probes)
                prepared, probed = prepared._replace(constants=constants), _probed_job(lists, *chosen)
        job = _search_job(prepared, codes, codec, scale, bases, own_scores, own, metric, norms, keep)
        enqueue(job, probed, query.device)
    return SearchResult(scores, positions)


def _probed_job(lists: Lists, nearest: Tensor, ends: Tensor) -> _C.Probed:
    """The job must not outlive the lists, nearest [Q, probes] and ends [Q, probes]."""
    L, probes = len(lists), nearest.shape[1]
    return native.Probed(starts=pointer(lists.starts), lists=pointer(nearest), ends=pointer(ends), L=L, probes=probes)


def enqueue(job: _C.Search, probed: _C.Probed | None, device: torch.device) -> None:
    """Enqueues a search on the device's current stream."""
    with torch.cuda.device(device):
        workspace = torch.empty(native.search_cuda_workspace(job, probed), dtype=torch.uint8, device=device)
        native.search_cuda(job, probed, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)


def scan_given(
    prepared: definition.Prepared,
    codes: Tensor,
    codec: Parameters,
    scores: Tensor,
    positions: Tensor,
    metric: str,
    norms: Tensor | None = None,
    keep: Tensor | None = None,
    threads: int = 1,
    probed: tuple[Lists, Tensor, int] | None = None,
) -> None:
    """Fills scores [Q, k] and positions [Q, k] int64 with the best codes on the CPU, given the products of queries and
    codewords.

    All in float32; codes [N, L] uint8, or two-byte codes in int16, rows perhaps apart; norms [N] for l2 and cosine;
    keep [N] bool. probed: lists, their products [Q, lists] with the queries, and how many lists each query looks at.
    """
    norms = None if norms is None else norms.float().contiguous()
    bases = codec.table(bases_of)
    job = _search_job(prepared, codes, codec, codec.scale, bases, scores, positions, metric, norms, keep)
    if probed is None:
        native.search_given_cpu(job, instruction_set(), threads)
    else:
        lists, products, probes = probed
        native.search_given_lists_cpu(job, _lists_job(lists, probes, products), instruction_set(), threads)


def _search_job(
    prepared: definition.Prepared,
    codes: Tensor,
    codec: Parameters,
    scale: Tensor,
    bases: Tensor,
    scores: Tensor,
    positions: Tensor,
    metric: str,
    norms: Tensor | None,
    keep: Tensor | None,
) -> _C.Search:
    """The job must not outlive the tensors, which are dense but for the rows of codes."""
    (Q, T), (N, M) = prepared.table.shape, codes.shape
    return native.Search(
        table=pointer(prepared.table),
        constants=pointer(prepared.constants),
        lengths=pointer(prepared.lengths),
        scale=pointer(scale),
        bases=pointer(bases),
        codes=pointer(codes),
        norms=pointer(norms),
        keep=pointer(keep),
        scores=pointer(scores),
        positions=pointer(positions),
        Q=Q,
        N=N,
        K=codec.codewords,
        T=T,
        M=M,
        k=scores.shape[1],
        stride=codes.stride(0) if N > 1 else M,
        metric=_METRICS[metric],
        wide=codes.dtype == torch.int16,
    )


def adc(query: Tensor, codes: Tensor, codec: Parameters, metric: str, norms: Tensor | None) -> Tensor:
    """Scores [Q, N] of all codes [N, L]: see `backends.torch.adc`; differentiable once."""
    with modes.precise(query.device.type):
        offset = None if codec.offset is None else codec.offset.float()
        prepared = definition.prepare(query.float(), codec.codebook.float(), offset, metric)
        sums = _Lookup.apply(prepared.table, _table_rows(codec, codes), codec.scale.float())
        if metric != "ip" and norms is None:
            norms = definition.squared_norms(codes.flatten(0, -2), codec, metric).view(codes.shape[:-1])
        return definition.scores_of(sums, None if norms is None else norms.float(), prepared, metric)


def _with_gradient(query: Tensor, database: Database, found: SearchResult) -> SearchResult:
    """What was found, with a gradient: its positions are scored once more, by differentiable operations."""
    if len(database.codes) == 0:
        return found
    rows = found.positions.clamp_min(0)
    again = _scores_at(rows, query, database)
    usable = (found.positions >= 0) & again.isfinite()
    zero = torch.where(usable, again - again.detach(), 0)  # exact, and it carries the gradient
    return SearchResult(found.scores + zero, found.positions)


def _scores_at(rows: Tensor, query: Tensor, database: Database) -> Tensor:
    """Scores [Q, k] of the rows [Q, k] that each query found; differentiable."""
    codes, codec, metric, lists = (
        definition.numbers(database.codes)[rows],
        database.codec,
        database.metric,
        database.lists,
    )
    norms = None if database.norms is None else database.norms[rows]
    if lists is None:
        return adc(query, codes, codec, metric, norms)
    with modes.precise(query.device.type):
        query, offset = query.float(), None if codec.offset is None else codec.offset.float()
        prepared = definition.prepare(query, codec.codebook.float(), offset, metric)
        products = inverted.products_of(query, lists.centroids.float(), offset, metric).gather(1, lists.of(rows))
        if metric != "ip" and norms is None:
            norms = definition.squared_norms(database.codes, codec, metric, lists)[rows]
        constants = inverted.constants_of(products, prepared.constants, metric)
        sums = _Lookup.apply(prepared.table, _table_rows(codec, codes), codec.scale.float())
        return definition.scores_of(sums, norms, prepared._replace(constants=constants), metric)


def _table_rows(codec: Parameters, codes: Tensor) -> Tensor:
    """The entries of a query's table that codes [..., L] stand for."""
    return codes if codec.shared else codec.rows(codes)


class _Lookup(torch.autograd.Function):
    """`backends.torch.lookup` by compiled code; the gradients are added up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """sums [Q, N] of table [Q, T], codes [N, L] or [Q, N, L] below T, scale [M]."""
        ctx.save_for_backward(table, codes, scale)
        return lookup(table, codes, scale) if codes.ndim == 2 else definition.lookup(table, codes.long(), scale)

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of table and scale."""
        refuse_second_derivatives("adc", "native")
        table, codes, scale = ctx.saved_tensors
        dtable, dscale = torch.zeros_like(table), torch.zeros_like(scale)
        for m in range(codes.shape[-1]):
            by_codeword = _sums_by_codeword(dsums, codes[..., m].long(), table.shape[1])
            dtable += scale[m] * by_codeword
            dscale[m] = (table * by_codeword).sum()
        return dtable, None, dscale


def _sums_by_codeword(values: Tensor, codes: Tensor, K: int) -> Tensor:
    """[Q, K]: the values [Q, N] summed by their codes [N] or [Q, N]; by one-hot products where adding has no order."""
    if values.device.type == "cpu":
        if codes.ndim == 1:
            return values.new_zeros(K, len(values)).index_add_(0, codes, values.T).T
        return values.new_zeros(len(values), K).scatter_add_(1, codes, values)
    total = values.new_zeros(len(values), K)
    for part, columns in zip(values.split(4096, dim=1), codes.split(4096, dim=-1), strict=True):
        total += (part[:, None] @ torch.nn.functional.one_hot(columns, K).to(values)).squeeze(1)
    return total


def lookup(table: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """sums [Q, N] from table [Q, K], codes [N, L] in 0..K-1 and scale [M], all float32: see `backends.torch.lookup`."""
    table, scale = table.contiguous(), scale.contiguous()
    codes = codes.contiguous() if codes.dtype in (torch.uint8, torch.int32) else codes.to(torch.int32).contiguous()
    (Q, K), (N, M) = table.shape, codes.shape
    sums = torch.empty(Q, N, dtype=torch.float32, device=table.device)
    job = native.Lookup(
        table=table.data_ptr(),
        scale=scale.data_ptr(),
        codes=codes.data_ptr(),
        sums=sums.data_ptr(),
        Q=Q,
        N=N,
        K=K,
        M=M,
        wide=codes.dtype == torch.int32,
    )
    if table.device.type == "cpu":
        native.lookup_cpu(job, torch.get_num_threads())
    else:
        with torch.cuda.device(table.device):
            native.lookup_cuda(job, torch.cuda.current_stream().cuda_stream)
    return sums


def _dense_floats(values: Tensor) -> Tensor:
    """The values as contiguous float32, without a graph."""
    dense = values.dtype is torch.float32 and values.is_contiguous()
    return values if dense else values.detach().float().contiguous()


def _norms(database: Database) -> Tensor | None:
    """The norms [N] that the metric needs, dense."""
    if database.metric == "ip":
        return None
    norms = database.norms
    if norms is None:
        small = database.device.type == "cpu" and len(database.codec.codebook) <= MAX_CODEWORDS
        column = squared_norms if small else definition.squared_norms
        norms = column(database.codes, database.codec, database.metric, database.lists)
    return _dense_floats(norms)


def _copying_pays(database: Database, queries: int) -> bool:
    """Whether to copy the codes that a filter keeps, since a scan that skips most codes is slow.

    It pays for less than half of the codes if there are many queries, and for very few codes always. It does not pay
    with lists, because queries do not look at all codes there.
    """
    return database.lists is None and database.table(_share_kept) < (1 / 2 if queries >= _FILTERED else 1 / 64)


def _share_kept(database: Database) -> float:
    """About how many of the codes the filter keeps, by a sample."""
    assert database.keep is not None
    sample = database.keep[:: max(1, database.keep.shape[0] // 1024)]
    kept = single_threaded(sample.count_nonzero) if sample.device.type == "cpu" else sample.count_nonzero()
    return int(kept) / sample.shape[0] if len(sample) else 1.0


def _kept(database: Database) -> tuple[Tensor, Database]:
    """The positions of the codes that the filter keeps, and these codes alone."""

    def copy() -> tuple[Tensor, Database]:
        assert database.keep is not None
        rows = database.keep.nonzero().squeeze(1)
        return rows, database.rows(rows)

    return single_threaded(copy) if database.device.type == "cpu" else copy()
