"""drq_fast for ann-benchmarks; a copy of this folder is `ann_benchmarks/algorithms/drq_fast` of that project."""

import torch

import drq_fast

from ..base.module import BaseANN

METRICS = {"euclidean": "l2", "angular": "cosine"}


class DrqFast(BaseANN):
    """Codes of `bits` in inverted lists, whose best candidates are scored again by float16 vectors."""

    def __init__(self, metric, bits):
        if metric not in METRICS:
            raise NotImplementedError(f"drq_fast has no metric {metric}.")
        self.metric, self.bits, self.probes, self.refine = METRICS[metric], bits, None, None
        self.threads = torch.get_num_threads()

    def fit(self, X):
        """X [N, D]; positions are ids."""
        torch.set_num_threads(self.threads)
        options = {"bits": self.bits, "metric": self.metric, "vectors": "float16", "seed": 0, "tune": False}
        self.index = drq_fast.Index.build(X, **options)

    def set_query_arguments(self, probes, refine):
        """How many lists are looked at, if there are lists, and how many candidates are scored again."""
        self.probes = None if self.index.lists is None else min(probes, self.index.lists)
        self.refine = refine

    def query(self, q, n):
        """The ids of the n neighbours of q [D], or of fewer; with one thread, as the rules are."""
        torch.set_num_threads(1)
        return self._search(q[None], n)[0]

    def batch_query(self, X, n):
        """Keeps the same for each of X [Q, D]."""
        torch.set_num_threads(self.threads)
        self.res = self._search(X, n)

    def _search(self, queries, n):
        """An array of ids for each of queries [Q, D]; short where its lists have fewer than n vectors."""
        refine = None if self.refine is None else max(n, self.refine)
        ids = self.index.search(queries, n, probes=self.probes, refine=refine).ids
        return [row[row >= 0] for row in ids]

    def __str__(self):
        return f"DrqFast(bits={self.bits}, probes={self.probes}, refine={self.refine})"
