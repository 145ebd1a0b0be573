"""An index that keeps vectors and has lists, beside a model: changes, files, filters, all lists, and exact scores.

All numbers are small multiples of a power of 2, so that float32 adds them up exactly and every result has known bits.
"""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drq_fast import Codec, Index
from drq_fast.backends import plain_torch
from drq_fast.backends.types import SearchResult, Stored
from drq_fast.codec import directions
from drq_fast.index import IndexResult
from drq_fast.index.rows import Content
from drq_fast.index.vectors import DTYPES

from .common import METRICS, decoded, random_vectors, require

STEPS = 12


def exact(dice: random.Random, N: int, D: int) -> Tensor:
    """Multiples of 1/4 between -3 and 3 [N, D]."""
    return (random_vectors(dice, N, D).clamp(-3, 3) * 4).round() / 4


class Model:
    """An index, and what it should hold: by id, the user's vector and what is stored for it."""

    def __init__(self, dice: random.Random, folder: Path) -> None:
        self.dice, self.path = dice, folder / "a.drq"
        D, K, M = dice.choice((1, 3, 8, 16)), dice.choice((2, 16, 100, 256, 300)), dice.randint(1, 4)
        scale = torch.tensor([dice.choice((1, 1, -1)) * 0.5**m for m in range(M)])
        codec = Codec(exact(dice, K, D), scale, exact(dice, 1, D)[0] if dice.random() < 0.5 else None)
        lists = dice.choice((None, 1, 3, 20, 200))
        centroids = None if lists is None else exact(dice, lists, D)
        self.index = Index(codec, dice.choice(METRICS), vectors=dice.choice((None, *DTYPES)), centroids=centroids)
        self.empty = copy.deepcopy(self.index)  # encodes, and is never added to
        self.rows: dict[int, int] = {}  # by id: the row in `x` and `content`
        self.x, self.content = torch.empty(0, D), self.empty._content("add", torch.empty(0, D), 1)
        self.next_id = 0

    def note(self, ids: list[int], x: Tensor, beam: int) -> None:
        """What `ids` stand for from now on."""
        self.rows |= {i: len(self.x) + n for n, i in enumerate(ids)}
        new = self.empty._content("add", x, beam)
        self.x = torch.cat([self.x, x])
        self.content = self.content.extended(len(self.content.codes), new).map(lambda tensor: tensor[: len(self.x)])
        self.next_id = max([self.next_id, *(i + 1 for i in ids)])

    def add(self) -> None:
        count, beam = self.dice.choice((0, 1, 5, 100)), self.dice.choice((1, 1, 3))
        x, ids = exact(self.dice, count, self.index.dim), None
        if self.dice.random() < 0.5:
            free = sorted(set(range(self.next_id + 300)) - self.rows.keys())
            ids = self.dice.sample(free, count)
        given = self.index.add(x.numpy() if self.dice.random() < 0.3 else x, ids, beam=beam).tolist()
        wanted = list(range(self.next_id, self.next_id + count)) if ids is None else ids
        require(given == wanted, "add returned other ids")
        self.note(wanted, x, beam)

    def some_ids(self, most: int) -> list[int]:
        return self.dice.sample(sorted(self.rows), min(len(self.rows), self.dice.randint(0, most)))

    def remove(self) -> None:
        gone = self.some_ids(self.dice.choice((3, 100)))
        self.index.remove(gone)
        for i in gone:
            del self.rows[i]

    def upsert(self) -> None:
        ids = sorted({*self.some_ids(20), *(self.dice.randrange(self.next_id + 50) for _ in range(3))})
        self.dice.shuffle(ids)
        x = exact(self.dice, len(ids), self.index.dim)
        self.index.upsert(x, ids)
        self.note(ids, x, 1)

    def file(self) -> None:
        self.index.save(self.path)
        content, mmap = self.path.read_bytes(), self.dice.random() < 0.5
        self.index = Index.load(self.path, mmap=mmap)
        self.index.verify()
        self.index.save(self.path)
        require(self.path.read_bytes() == content, "a loaded index is saved as another file")

    def copied(self) -> None:
        self.index = copy.deepcopy(self.index) if self.dice.random() < 0.5 else pickle.loads(pickle.dumps(self.index))

    def order(self) -> None:
        if self.index.lists is not None:
            self.index._put_in_order()

    def tune(self) -> None:
        if self.index.vectors is None or not self.rows:
            return
        query, k = exact(self.dice, 4, self.index.dim), self.dice.randint(1, min(5, len(self.rows)))
        self.index.tune(query, k)
        for recall in {setting.recall for setting in self.index.tuning.settings if setting.recall > 0}:
            setting = self.index.tuning.cheapest(recall, k)
            a = self.index.search(query, k, recall=recall)
            b = self.index.search(query, k, probes=setting.probes, refine=setting.refine)
            if int(b.ids.min()) >= 0:  # else the search by recall looks at all lists
                same(a, b, "a search by recall is not that of its setting")

    def check(self) -> None:
        """Everything that is stored, and searches of all kinds."""
        rows = self.index._rows.living()
        ids = self.index.ids
        require(len(self.index) == len(ids) and set(ids.tolist()) == self.rows.keys(), "ids are wrong")
        at = torch.tensor([self.rows[i] for i in ids.tolist()], dtype=torch.int64)
        wanted = self.content.map(lambda tensor: tensor[at])
        for name, tensor in rows.content._asdict().items():
            expected = getattr(wanted, name)
            require(expected is None if tensor is None else torch.equal(tensor, expected), f"{name} are out of step")
        query = exact(self.dice, self.dice.choice((1, 2, 40)), self.index.dim)
        levels = self.dice.choice((None, self.dice.randint(1, self.index.levels)))
        k = self.dice.choice((1, 10, 150))
        keep, kept = self.filter(ids)
        by_codes = self.by_codes(query, decoded(self.index, wanted, levels)[kept])
        order = self.order_of_ties()[kept].argsort()
        expected = best(by_codes[:, order], ids[kept][order], k, self.index.metric)
        options: dict[str, Any] = {"levels": levels, "keep": keep}
        found = self.index.search(query, k, **options, probes=self.index.lists)
        same(found, expected, "a search of all lists is not that of all codes")
        if keep is not None:
            same(self.index.search(query, k, **options), expected, "a filter is not that of all lists")
        if self.index.lists is not None:
            few = self.index.search(query, k, **options, probes=self.dice.randint(1, self.index.lists))
            self.require_true(few, by_codes, ids[kept])
            usual = self.index.search(query, k, **options)
            self.require_true(usual, by_codes, ids[kept])
            require(int((usual.ids >= 0).sum(dim=1).min()) == min(k, len(kept)), "lists with too few were not left")
        self.check_refined(query, k, options, wanted, ids, kept)

    def order_of_ties(self) -> Tensor:
        """The place [n] of each living row where scores are equal: by its list, and after all that are in order."""
        rows = self.index._rows.living()
        places = torch.arange(rows.size)
        if rows.content.lists is not None:
            late = rows.ordered + rows.content.lists[rows.ordered :].argsort(stable=True)
            places[late] = torch.arange(rows.ordered, rows.size)
        return places

    def check_refined(
        self, query: Tensor, k: int, options: dict[str, Any], wanted: Content, ids: Tensor, kept: Tensor
    ) -> None:
        """With all codes as candidates, the scores are those of the vectors."""
        stored, own = wanted.stored(), None
        if stored is None:
            by_id = np.full((self.next_id + 1, self.index.dim), np.nan, np.float32)
            x = self.x[[self.rows[i] for i in ids.tolist()]]
            by_id[ids[kept].numpy()] = x[kept].numpy()
            own = by_id if self.dice.random() < 0.5 else torch.from_numpy(by_id)
            stored = Stored(directions(x) if self.index.metric == "cosine" else x)
        all_rows = max(k, self.index._rows.size)
        found = self.index.search(query, k, **options, refine=all_rows, probes=self.index.lists, vectors=own)
        if len(kept) == 0:
            require(bool((found.ids == -1).all()), "something was found where nothing was kept")
            return
        places = kept.expand(len(query), -1)
        scores, positions = plain_torch.refine(query, places, stored, self.index.metric, k)
        expected = IndexResult(scores, ids[positions.clamp_min(0)].where(positions >= 0, -1))
        same(found, expected, "scores by all vectors are not exact")
        near = best(self.by_vectors(query, stored.floats(kept).double()), ids[kept], k, self.index.metric).scores
        close = torch.isclose(found.scores, near, rtol=1e-4, atol=1e-4)
        require(bool(close.all()), "scores by all vectors are wrong")

    def filter(self, ids: Tensor) -> tuple[Any, Tensor]:
        """A filter for `search`, and the places in ids [n] that it keeps."""
        if self.dice.random() < 0.4:
            return None, torch.arange(len(ids))
        flags = torch.tensor([self.dice.random() < 0.4 for _ in range(self.next_id + 5)], dtype=torch.bool)
        places = flags[ids].nonzero().squeeze(1)
        return (flags if self.dice.random() < 0.5 else flags.nonzero().squeeze(1).tolist()), places

    def by_codes(self, query: Tensor, x_hat: Tensor) -> Tensor:
        """The scores [Q, n] of x_hat [n, D] float64, to the bit of float32."""
        scores = self.by_vectors(query, x_hat)
        if self.index.metric != "cosine":
            return scores
        lengths = [each.double().square().sum(dim=1).sqrt().float() for each in (query, x_hat)]
        both = lengths[0][:, None] * lengths[1]
        return torch.where(both > 0, (query.double() @ x_hat.T).float() / torch.where(both > 0, both, 1), 0)

    def by_vectors(self, query: Tensor, x: Tensor) -> Tensor:
        """The scores [Q, n] of x [n, D] float64, rounded to float32 at the end."""
        wide = query.double()
        if self.index.metric == "l2":
            return (wide[:, None] - x).square().sum(dim=2).float()
        if self.index.metric == "cosine":
            wide, x = (torch.nn.functional.normalize(each, dim=1) for each in (wide, x))
        return (wide @ x.T).float()

    def require_true(self, found: IndexResult, scores: Tensor, ids: Tensor) -> None:
        """Every result is one of ids [n] with its score of scores [Q, n], once, and they are in order."""
        wanted = {number: place for place, number in enumerate(ids.tolist())}
        for numbers, given, row in zip(found.ids.tolist(), found.scores, scores, strict=True):
            places = [wanted.get(i) for i in numbers if i >= 0]
            require(None not in places and len(set(places)) == len(places), "a list has other vectors")
            own = row[places]
            require(torch.equal(given[: len(places)], own), "a list has other scores")
            cost = own if self.index.metric == "l2" else -own
            require(bool((cost.diff() >= 0).all()), "results of lists are not in order")


def best(scores: Tensor, ids: Tensor, k: int, metric: str) -> IndexResult:
    """The k best of scores [Q, n], equal ones in the order of ids [n]."""
    order = plain_torch.rank(scores, k, metric)
    return IndexResult(*plain_torch.pad_result(scores.gather(1, order), ids[order], k, metric))


def same(found: IndexResult, expected: IndexResult | SearchResult, what: str) -> None:
    require(torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), what)


def indexes(dice: random.Random, folder: Path) -> int:
    model = Model(dice, folder)
    changes = (model.add, model.add, model.remove, model.upsert, model.file, model.copied, model.order, model.tune)
    model.check()
    for _ in range(STEPS):
        dice.choice(changes)()
        model.check()
    return STEPS
