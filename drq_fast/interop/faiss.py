"""Indexes and codecs from and to faiss; `pip install 'drq_fast[faiss]'`.

Residual quantization of faiss has one codebook for each level and no scales, so that a codec of ours becomes the
codebooks scale[m] * C, of which the first has the offset added.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

if importlib.util.find_spec("faiss") is None:
    raise ModuleNotFoundError("drq_fast.interop.faiss: faiss is missing; `pip install 'drq_fast[faiss]'` installs it.")

import torch  # before faiss: each brings an OpenMP runtime, and crashes have depended on the order

import faiss  # isort: skip
import numpy as np
from faiss.contrib import inspect_tools
from torch import Tensor

from .. import checks
from ..backends.torch import code_dtype, numbers
from ..codec import Codec
from ..index import Index
from ..index.coarse import default_probes, list_dtype
from ..index.file import check_codes
from ..index.rows import Content, Rows

_METRICS = {"l2": faiss.METRIC_L2, "ip": faiss.METRIC_INNER_PRODUCT}
_READ = (faiss.IndexResidualQuantizer, faiss.IndexIVFResidualQuantizer)
_BLOCK = 1 << 20  # codes that are converted at a time


def to_faiss(index: Index) -> Any:
    """See `Index.to_faiss`."""
    codec = index.codec
    if index.metric not in _METRICS:
        expected = "'l2' or 'ip', as faiss does not divide decoded vectors by their lengths"
        checks.fail("to_faiss", "index.metric", expected, repr(index.metric))
    if codec.unit:
        checks.fail("to_faiss", "codec.unit", "False, as faiss does not divide vectors by their lengths", True)
    index.verify()
    rows = index._readable().living()
    theirs = _empty(index)
    ids = None if rows.ids is None else rows.ids.long().cpu().numpy()
    flat = not isinstance(theirs, faiss.IndexIVF)
    if flat and ids is not None:
        theirs = faiss.IndexIDMap2(theirs)
    for first, codes in _packed(theirs, rows, codec.codewords):
        some = None if ids is None else ids[first : first + len(codes)]
        theirs.add_sa_codes(codes, some)
    if flat and ids is not None:
        theirs.construct_rev_map()
    return theirs


def from_faiss(theirs: Any, device: torch.device | str | None = None) -> Index:
    """See `Index.from_faiss`."""
    op, ids = "from_faiss", None
    inner = faiss.downcast_index(theirs) if isinstance(theirs, faiss.Index) else theirs
    if isinstance(inner, faiss.IndexIDMap):
        ids, inner = faiss.vector_to_array(inner.id_map), faiss.downcast_index(inner.index)
    if not isinstance(inner, _READ):
        expected = "an IndexResidualQuantizer or an IndexIVFResidualQuantizer, perhaps in an IndexIDMap"
        checks.fail(op, "index", expected, type(inner).__name__, error=TypeError)
    metric = next((name for name, number in _METRICS.items() if number == inner.metric_type), None)
    if metric is None:
        checks.fail(op, "index.metric_type", "METRIC_L2 or METRIC_INNER_PRODUCT", inner.metric_type)
    codec, centroids = codec_from_faiss(inner.rq, device), None
    if isinstance(inner, faiss.IndexIVF):
        if not inner.by_residual:
            checks.fail(op, "index.by_residual", "True, as codes of lists are relative to the centroids here", False)
        if inner.quantizer.metric_type != inner.metric_type:
            expected = "that of the index, by which lists are chosen here"
            checks.fail(op, "index.quantizer.metric_type", expected, inner.quantizer.metric_type)
        centroids = inner.quantizer.reconstruct_n(0, inner.nlist)
        parts = [inspect_tools.get_invlist(inner.invlists, number) for number in range(inner.nlist)]
        lists = np.repeat(np.arange(inner.nlist), [len(part[0]) for part in parts])
        own, codes = (np.concatenate(each) for each in zip(*parts, strict=True))
        ids = own if ids is None else ids[own]
        content = Content(_unpacked(inner.rq, codes, codec), torch.from_numpy(lists).to(list_dtype(inner.nlist)))
    else:
        content = Content(_unpacked(inner.rq, inspect_tools.get_flat_codes(inner), codec))
    index = Index(codec, metric, centroids=centroids)
    index._append(op, content.map(lambda tensor: tensor.to(codec.device)), ids)
    if centroids is not None:
        index._put_in_order()
    return index


def codec_from_faiss(quantizer: Any, device: torch.device | str | None = None) -> Codec:
    """See `Codec.from_faiss`."""
    op = "from_faiss"
    if not isinstance(quantizer, faiss.ResidualQuantizer):
        checks.fail(op, "quantizer", "a faiss.ResidualQuantizer", type(quantizer).__name__, error=TypeError)
    if not quantizer.is_trained:
        checks.fail(op, "quantizer", "trained", "one without codebooks")
    books = inspect_tools.get_additive_quantizer_codebooks(quantizer)
    books = _padded([torch.from_numpy(book) for book in books], max(map(len, books)))
    return Codec.from_codebooks(list(books[:, : _without_copies(books)]), device=device)


def _empty(index: Index) -> Any:
    """An index of faiss without codes, with the codec, the metric and the lists of ours."""
    codec, metric = index.codec, _METRICS[index.metric]
    K, M = codec.codewords, codec.levels
    books = codec.scale[:, None, None] * torch.stack([codec.words(m) for m in range(M)])
    offset = torch.zeros(codec.dim) if codec.offset is None else codec.offset.cpu()
    bits = (K - 1).bit_length()
    # Norms of 4 bytes per vector, so that a search adds up table entries. Inner products need none.
    kind = faiss.AdditiveQuantizer.ST_norm_float if index.metric == "l2" else faiss.AdditiveQuantizer.ST_LUT_nonorm
    coarse = index._coarse
    if coarse is None:
        books[0] += offset.to(books.device)
        theirs = faiss.IndexResidualQuantizer(codec.dim, M, bits, metric, kind)
    else:
        quantizer = faiss.IndexFlat(codec.dim, metric)
        quantizer.add((coarse.centroids.cpu() + offset).numpy())
        theirs = faiss.IndexIVFResidualQuantizer(quantizer, codec.dim, len(coarse), M, bits, metric, kind)
        theirs.nprobe = default_probes(len(coarse))
    padded = _padded(list(books.cpu()), 1 << bits)
    faiss.copy_array_to_vector(padded.flatten().numpy(), theirs.rq.codebooks)
    theirs.rq.is_trained = theirs.is_trained = True
    return theirs


def _padded(books: Sequence[Tensor], size: int) -> Tensor:
    """Codebooks [K, D] as [M, size, D]: with copies of their last codewords, which change no distance."""
    return torch.stack([torch.cat([book, book[-1:].expand(size - len(book), -1)]) for book in books])


def _without_copies(books: Tensor) -> int:
    """How many codewords codebooks [M, K, D] have without what `_padded` adds; at least 2."""
    same = (books[:, :-1] == books[:, 1:]).all(dim=2).all(dim=0)  # [K - 1]: whether codeword k + 1 is a copy of k
    return max(2, len(same) + 1 - int(same.flip(0).long().cumprod(0).sum()))


def _packed(theirs: Any, rows: Rows, codewords: int) -> Iterator[tuple[int, np.ndarray]]:
    """Numbers of first rows, with the codes of blocks of rows in the format of `sa_encode`."""
    base = faiss.downcast_index(theirs.index) if isinstance(theirs, faiss.IndexIDMap) else theirs
    coarse = base.coarse_code_size() if isinstance(base, faiss.IndexIVF) else 0
    for first in range(0, rows.size, _BLOCK):
        block = slice(first, first + _BLOCK)
        codes = numbers(rows.codes[block]).to("cpu", torch.int32, copy=True)
        check_codes("to_faiss", codes, codewords)  # those of a mapped file may have changed, and faiss does not check
        packed = np.empty((len(codes), base.rq.code_size), np.uint8)
        base.rq.pack_codes(len(codes), faiss.swig_ptr(codes.numpy()), faiss.swig_ptr(packed))
        if coarse and rows.content.lists is not None:
            lists = rows.content.lists[block].cpu().numpy().astype("<i8")
            packed = np.concatenate([lists[:, None].view(np.uint8)[:, :coarse], packed], axis=1)
        yield first, packed


def _unpacked(quantizer: Any, packed: np.ndarray, codec: Codec) -> Tensor:
    """Codes [N, levels] of strings of bits [N, code_size]; those of copies of the last codeword become its own."""
    nbits, last = faiss.vector_to_array(quantizer.nbits), codec.codewords - 1
    codes = torch.empty(len(packed), codec.levels, dtype=code_dtype(codec.codewords))
    for first in range(0, len(packed), _BLOCK):
        block = slice(first, first + _BLOCK)
        codes[block] = torch.from_numpy(faiss.unpack_bitstrings(packed[block], nbits)).clamp_max(last)
    return codes
