"""What inverted lists add to a search, in plain torch: constants of queries, the choice of lists, shifts of norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..types import Lists, Parameters

_MAX_INNER = 1 << 22  # inner products of centroids and codewords that are held at a time


def products_of(query: Tensor, centroids: Tensor, offset: Tensor | None, metric: str) -> Tensor:
    """products [Q, L] = <q, centroids[l]> of queries [Q, D]. For l2, q is the query less the offset."""
    return (query - offset if metric == "l2" and offset is not None else query) @ centroids.T


def constants_of(products: Tensor, constants: Tensor, metric: str) -> Tensor:
    """The constants [Q, ...] of queries within lists, from products [Q, ...] with the lists and constants [Q]."""
    own = constants.view(-1, *[1] * (products.ndim - 1))
    return own - 2 * products if metric == "l2" else own + products


def nearest_lists(products: Tensor, constants: Tensor, lists: Lists, metric: str, probes: int | None) -> Tensor:
    """The lists [Q, probes] nearest to each query, by ||q - centroid||^2 (l2) or by the most <q, centroid>.

    Ties go to the least number of a list, and NaN comes last. products [Q, L], constants [Q].
    """
    distance = -products
    if metric == "l2":
        distance = (lists.table(centroid_norms) - 2 * products) + constants[:, None]
    return distance.detach().sort(dim=1, stable=True).indices[:, :probes]


def centroid_norms(lists: Lists) -> Tensor:
    """||centroids[l]||^2 [L]."""
    return lists.centroids.square().sum(dim=1)


class Probed(NamedTuple):
    """constants [Q, L] of queries within lists, the nearest lists [Q, probes], which they look at, ends [Q, probes]:
    how many rows the first 1, 2, .. of these have together."""

    constants: Tensor
    nearest: Tensor
    ends: Tensor


def probed_lists(products: Tensor, constants: Tensor, lists: Lists, metric: str, probes: int | None) -> Probed:
    """What queries look at, given products [Q, L] and constants [Q]; nothing waits for a GPU."""
    nearest = nearest_lists(products, constants, lists, metric, probes).contiguous()
    ends = lists.starts.diff()[nearest].cumsum(dim=1)
    return Probed(constants_of(products, constants, metric), nearest, ends)


class Shifts(NamedTuple):
    """How the norms of rows begin..end, which are those of lists first.., differ from those of their codes alone.

    With t the centroid (l2) or offset + centroid (cosine) of a list: inner [lists, K] = 2 <C_k, t> and constants
    [lists] = <t, t>.
    """

    first: int
    begin: int
    end: int
    inner: Tensor
    constants: Tensor


def shifts_of(codec: Parameters, metric: str, lists: Lists) -> Iterator[Shifts]:
    """The shifts of all lists, some lists at a time."""
    codebook, offset = codec.codebook, codec.offset if metric == "cosine" else None
    for first in range(0, len(lists), step := max(1, _MAX_INNER // len(codebook))):
        shift = lists.centroids[first : first + step].to(codebook.dtype)
        shift = shift if offset is None else shift + offset
        begin, end = lists.starts[[first, first + len(shift)]].tolist()
        yield Shifts(first, begin, end, 2 * (shift @ codebook.T), shift.square().sum(dim=1))
