"""Makes the codes of many vectors unique with little additional error (docs/semantic_ids.md)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import functional
from .codec import Codec

_TILE = 1 << 22  # numbers of a [rows, K] or [groups, K] matrix that is held at a time
_FEW = 256  # colliding items of a group up to which their assignment is optimal


def unique_codes(
    codec: Codec, x: Tensor, codes: np.ndarray, taken: np.ndarray, keys: np.ndarray, beam: int
) -> np.ndarray:
    """Codes [n, M] like these of x [n, D], but unique and different from the sorted codes `taken` [N, M].

    keys [N]: `keys_of` the taken codes. From the first level to the last: at most room = K**(M - 1 - m) ids start with
    the same m + 1 codes. Where more items do, items wait that have the same first m codes and a crowded codeword, and
    are assigned to codewords of level m with free ids. Items that change their codeword are encoded again from there.
    There must be at least n free ids.
    """
    assignment = _Assignment(codec, x, codes.copy(), taken, keys, beam)
    for m in range(codec.levels):
        assignment.settle_level(m)
    return assignment.codes


class _Assignment:
    """The arguments of `unique_codes`; `codes` changes in place."""

    def __init__(
        self, codec: Codec, x: Tensor, codes: np.ndarray, taken: np.ndarray, keys: np.ndarray, beam: int
    ) -> None:
        self.codec, self.x, self.codes, self.taken, self.keys, self.beam = codec, x, codes, taken, keys, beam
        self.norms = [codec.words(m).square().sum(dim=1) for m in range(codec.levels)]

    def settle_level(self, m: int) -> None:
        """Gives each prefix of m + 1 codes at most as many items as it has free ids."""
        room = self.codec.codewords ** (self.codec.levels - 1 - m)
        if len(self.codes) + len(self.taken) <= room:
            return
        _, at, counts = np.unique(keys_of(self.codes, self.codec, m + 1), return_index=True, return_counts=True)
        first, last = self.range_of(self.codes[at], m + 1)
        parent = keys_of(self.codes, self.codec, m)
        rows = np.flatnonzero(np.isin(parent, parent[at[counts + last - first > room]]))
        rows = rows[parent[rows].argsort(kind="stable")]
        starts = np.unique(parent[rows], return_index=True)[1][:: _TILE // self.codec.codewords]
        for part in np.split(rows, starts[1:]) if len(rows) else ():
            moved = self.settle(part, m, room)
            if m + 1 == self.codec.levels:
                continue
            tail = self.codec.part(slice(m + 1, None), offset=False)
            for block in blocks(moved, self.codec.dim * self.beam):
                weights = (self.codec.level_weights or ())[m + 1 :]
                omega = weights if any(weights) else functional.default_weights(len(tail.scale))
                found = functional.encode_checked(self.residual(block, m + 1), tail, self.beam, omega)
                self.codes[block, m + 1 :] = found.cpu().numpy()

    def range_of(self, codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first of the taken codes, and the one after the last, that start like each of these."""
        first = self.keys.searchsorted(keys_of(codes, self.codec, length))
        return first, self.keys.searchsorted(keys_of(codes, self.codec, length, -1), side="right")

    def settle(self, rows: np.ndarray, m: int, room: int) -> np.ndarray:
        """Assigns rows, which are all items of some groups, to the codewords of level m; returns those that moved."""
        K = self.codec.codewords
        _, at, group, size = np.unique(
            keys_of(self.codes[rows], self.codec, m), return_index=True, return_inverse=True, return_counts=True
        )
        places = self.places(rows[at], m, room)
        column = group * K + self.codes[rows, m]
        waiting = np.flatnonzero((np.bincount(column, minlength=len(places)) > places)[column])
        few = (np.bincount(group[waiting], minlength=len(at)) <= _FEW) & (size * K <= _TILE) & (room == 1)
        whole = np.flatnonzero(few[group])
        for part in np.split(whole, _cuts(group[whole], _TILE // K)) if len(whole) else ():
            costs = self.costs(rows[part], places.reshape(-1, K)[group[part]] == 0, m)
            dense = np.unique(group[part], return_inverse=True)[1]
            column[part] = group[part] * K + _Matching(costs.cpu().numpy(), dense).solve()
        self.place(rows, m, group, column, places, waiting[~few[group[waiting]]])
        moved = rows[column % K != self.codes[rows, m]]
        self.codes[rows, m] = column % K
        return moved

    def place(
        self, rows: np.ndarray, m: int, group: np.ndarray, column: np.ndarray, places: np.ndarray, waiting: np.ndarray
    ) -> None:
        """Gives the waiting rows columns (group * K + codeword) with free places, in rounds: the greedy assignment.

        In each round an item chooses the codeword with the least error. Where more items choose it than there are
        places, those have priority that lose most by their second choice, and the others choose what would be left if
        all of them had the same order of preference.
        """
        K, held = self.codec.codewords, np.ones(len(rows), dtype=bool)
        held[waiting] = False
        free = places - np.bincount(column[held], minlength=len(places))
        loss = np.zeros(len(rows), dtype=np.float32)
        while len(waiting):
            table = free.reshape(-1, K)
            for part in blocks(waiting, K):
                costs = self.costs(rows[part], table[group[part]] <= 0, m).cpu().numpy()
                column[part] = group[part] * K + costs.argmin(axis=1)
                least = np.partition(costs, 1, axis=1)
                loss[part] = least[:, 1] - least[:, 0]
            waiting = waiting[np.lexsort((-loss[waiting], column[waiting]))]
            rank = _rank(column[waiting])
            late = rank >= free[column[waiting]]
            for part, passed in zip(blocks(waiting[late], K), blocks(rank[late], K), strict=True):
                left = table[group[part]].clip(0)
                order = self.costs(rows[part], left == 0, m).sort(dim=1, stable=True).indices.cpu().numpy()
                beyond = np.take_along_axis(left, order, axis=1).cumsum(axis=1) > passed[:, None]
                column[part] = group[part] * K + order[np.arange(len(part)), beyond.argmax(axis=1)]
            waiting = waiting[np.lexsort((-loss[waiting], column[waiting]))]
            placed = _rank(column[waiting]) < free[column[waiting]]
            free -= np.bincount(column[waiting[placed]], minlength=len(places))
            waiting = np.sort(waiting[~placed])

    def places(self, rows: np.ndarray, m: int, room: int) -> np.ndarray:
        """Free ids per codeword of level m, for the groups that these rows [G] are in, as [G * K]."""
        places = np.full((len(rows), self.codec.codewords), room)
        first, last = self.range_of(self.codes[rows], m)
        for g in np.flatnonzero(last > first):
            places[g] -= np.bincount(self.taken[first[g] : last[g], m], minlength=self.codec.codewords)
        return places.reshape(-1)

    def costs(self, rows: np.ndarray, closed: np.ndarray, m: int) -> Tensor:
        """Squared errors [n, K] less ||x||^2 of the codewords of level m; infinite where `closed` [n, K]."""
        scale = self.codec.scale[m]
        costs = scale.square() * self.norms[m] - self.residual(rows, m) @ (2 * scale * self.codec.words(m).T)
        return costs.masked_fill_(torch.from_numpy(closed).to(costs.device), torch.inf)

    def residual(self, rows: np.ndarray, m: int) -> Tensor:
        """What the first m levels leave of x [n, D]."""
        return residual(self.codec, self.x, rows, self.codes[rows, :m])


def _rank(columns: np.ndarray) -> np.ndarray:
    """The position [n] of each entry among the equal ones of the sorted columns [n]."""
    return np.arange(len(columns)) - columns.searchsorted(columns)


def _cuts(group: np.ndarray, limit: int) -> np.ndarray:
    """Where to cut the sorted groups [n] into parts of whole groups that have about `limit` entries."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return starts[1:][np.diff(starts // max(1, limit)) > 0]


class _Matching:
    """Different columns for the rows of each group with the least sum of cost [n, K]; group [n] counts from 0.

    Successive shortest paths (the Hungarian method), in all groups at the same time: rows take their cheapest columns,
    and then each row without a column gets one by the cheapest chain of moves, which Dijkstra's algorithm finds on
    costs reduced by the duals u [n] and v [groups, K].
    """

    def __init__(self, cost: np.ndarray, group: np.ndarray) -> None:
        self.cost, self.group = cost, group
        self.u, self.v = cost.min(axis=1), np.zeros((group[-1] + 1, cost.shape[1]), dtype=np.float32)
        self.column = cost.argmin(axis=1)
        self.owner = np.full(self.v.shape, -1, dtype=np.int32)
        self.owner[group[::-1], self.column[::-1]] = np.arange(len(cost))[::-1]  # the first of several rows

    def solve(self) -> np.ndarray:
        """The columns [n]."""
        waiting = np.flatnonzero(self.owner[self.group, self.column] != np.arange(len(self.cost)))
        while len(waiting):
            chosen = np.unique(self.group[waiting], return_index=True)[1]
            self.augment(waiting[chosen])
            waiting = np.delete(waiting, chosen)
        return self.column

    def augment(self, start: np.ndarray) -> None:
        """Gives a column to each of the rows `start`, one per group."""
        g, row, low, sink = (
            self.group[start],
            start.copy(),
            np.zeros(len(start), dtype=np.float32),
            np.zeros_like(start),
        )
        distance = np.full((len(g), self.v.shape[1]), np.inf, dtype=np.float32)
        via, done = np.zeros(distance.shape, dtype=np.int32), np.zeros(distance.shape, dtype=bool)
        active = np.arange(len(g))
        while len(active):
            i, near = row[active], distance[active]
            reach = self.cost[i] + (low[active] - self.u[i])[:, None] - self.v[g[active]]
            better = (reach < near) & ~done[active]
            distance[active] = near = np.where(better, reach, near)
            via[active] = np.where(better, i[:, None].astype(np.int32), via[active])
            near[done[active]] = np.inf
            j = near.argmin(axis=1)
            low[active], done[active, j], sink[active] = near[np.arange(len(j)), j], True, j
            row[active] = self.owner[g[active], j]
            active = active[row[active] >= 0]
        shift = np.subtract(low[:, None], distance, out=np.zeros_like(distance), where=done)
        passed = done & (self.owner[g] >= 0)
        self.v[g] -= shift
        self.u[start] += low
        self.u[self.owner[g][passed]] += shift[passed]
        active, j = np.arange(len(g)), sink
        while len(active):  # back along the path
            i = via[active, j]
            left = self.column[i]
            self.owner[g[active], j], self.column[i] = i, j
            more = i != start[active]
            active, j = active[more], left[more]


def residual(codec: Codec, x: Tensor, rows: np.ndarray, codes: np.ndarray) -> Tensor:
    """x[rows] [n, D] less what codes [n, L] stand for, on the codec's device; less the offset if L is 0."""
    values = x[torch.from_numpy(rows).to(x.device)].to(codec.device, torch.float32)
    if codes.shape[1]:
        return values - codec.decode(torch.from_numpy(codes))
    return values if codec.offset is None else values - codec.offset


def keys_of(codes: np.ndarray, codec: Codec, length: int | None = None, fill: int = 0) -> np.ndarray:
    """Keys [n] that sort like codes [n, L]; levels after `length` (L by default) are replaced by `fill`."""
    width = np.dtype(np.uint8 if codec.codewords <= 256 else ">u2")
    size = -(-codec.levels * width.itemsize // 8) * 8  # bytes
    padded = np.full((len(codes), size // width.itemsize), fill % 256**width.itemsize, dtype=width)
    length = codes.shape[1] if length is None else length
    padded[:, :length] = codes[:, :length]
    return padded.view(">u8").astype(np.uint64)[:, 0] if size == 8 else padded.view(f"S{size}")[:, 0]


def blocks(rows: np.ndarray, width: int) -> list[np.ndarray]:
    """The rows in parts whose matrices [rows, width] fit a tile."""
    step = max(1, _TILE // width)
    return np.split(rows, range(step, len(rows), step))
