"""mAP@R: on numbers worked out by hand, and against the average over random orders of ties."""

from __future__ import annotations

import itertools

import pytest
import torch

import drq_fast
from drq_fast.retrieval import evaluate
from drq_fast.retrieval.evaluate import average_precision


def plain(relevant: list[bool], R: int) -> float:
    hits = [sum(relevant[: i + 1]) / (i + 1) for i in range(min(R, len(relevant))) if relevant[i]]
    return sum(hits) / len(hits) if hits else 0.0


def test_by_hand_without_ties():
    scores, relevant = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[True, False, True, True]])
    assert average_precision(scores, relevant).item() == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert average_precision(scores, relevant, R=2).item() == pytest.approx(1)
    assert average_precision(scores, relevant, largest=True).item() == pytest.approx((1 + 1 + 3 / 4) / 3)
    assert average_precision(scores, ~relevant, R=1).item() == 0
    assert average_precision(scores[:, :0], relevant[:, :0]).tolist() == [0]


@pytest.mark.parametrize("R", [1, 2, 4, 6, 9])
def test_ties_are_averaged_over_all_orders(R):
    generator = torch.Generator().manual_seed(R)
    for _ in range(20):
        scores = torch.randint(3, (1, 6), generator=generator).float()
        relevant = torch.randint(2, (1, 6), generator=generator).bool()
        orders = [
            p for p in itertools.permutations(range(6)) if all(scores[0, p[i]] <= scores[0, p[i + 1]] for i in range(5))
        ]
        expected = sum(plain([bool(relevant[0, i]) for i in p], R) for p in orders) / len(orders)
        assert average_precision(scores, relevant, R=R).item() == pytest.approx(expected)


def test_a_large_tie_with_few_relevant_items():
    relevant = torch.zeros(2, 1000, dtype=torch.bool)
    relevant[0, 17] = True
    relevant[1, ::10] = True
    result = average_precision(torch.zeros(2, 1000), relevant, R=10)
    assert result[0].item() == pytest.approx(sum(1 / i for i in range(1, 11)) / 1000)
    generator = torch.Generator().manual_seed(0)
    runs = [plain(relevant[1, torch.randperm(1000, generator=generator)].tolist(), 10) for _ in range(4000)]
    assert result[1].item() == pytest.approx(sum(runs) / 4000, abs=0.015)


def random_codes(seed: int, N: int = 300, C: int = 4):
    """A layer with fitted codes that tie often, labels (several per item), queries and theirs."""
    generator = torch.Generator().manual_seed(seed)
    x, query = torch.randn(N, 6, generator=generator), torch.randn(9, 6, generator=generator)
    layer = drq_fast.RecurrentQuantizer(6, 8, 3)
    layer.initialise(x, seed=0)
    labels = torch.rand(N, C, generator=generator) < 0.3
    query_labels = torch.rand(9, C, generator=generator) < 0.4
    query_labels[3] = False  # a query to which nothing is relevant
    return layer, layer.encode(x), labels, query, query_labels


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("R", [None, 1, 20, 150, 1000])
def test_codes_are_ranked_as_all_items_with_their_ties_would_be(metric, R):
    layer, codes, labels, query, query_labels = random_codes(0)
    found = evaluate.evaluate_codes(layer, codes, labels, query, query_labels, R=R, metric=metric, depths=(1, 10, 300))
    relevant = (query_labels.float() @ labels.float().T) > 0
    for L, figures in enumerate(found, 1):
        scores = drq_fast.functional.adc(
            query, codes[:, :L], layer.codebook, layer.scale[:L], offset=layer.offset, metric=metric
        ).detach()
        expected = average_precision(scores, relevant, R, largest=metric != "l2").mean().item()
        assert figures.mean_average_precision == pytest.approx(expected, abs=1e-12)
        assert figures.bits == 3 * L
        assert figures.precision[2] == pytest.approx(relevant.double().mean().item())


def test_precision_and_recall_are_averages_over_the_orders_of_ties():
    layer, codes, labels, query, query_labels = random_codes(1)
    (figures, *_) = evaluate.evaluate_codes(layer, codes, labels, query, query_labels, depths=(1, 7, 40, 600))
    relevant = (query_labels.float() @ labels.float().T) > 0
    scores = drq_fast.functional.adc(query, codes[:, :1], layer.codebook, layer.scale[:1], offset=layer.offset)
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(9, 300, dtype=torch.float64)
    rounds = 3000
    for _ in range(rounds):  # a stable sort of shuffled items is a random order of ties
        shuffled = torch.randperm(300, generator=generator)
        order = shuffled[scores.detach()[:, shuffled].sort(dim=1, stable=True).indices]
        hits += relevant.gather(1, order).double().cumsum(dim=1) / rounds
    for depth, precision in zip((1, 7, 40), figures.precision, strict=False):
        assert precision == pytest.approx(hits[:, depth - 1].mean().item() / depth, abs=0.015)
    assert figures.precision[3] == pytest.approx(relevant.sum(dim=1).double().mean().item() / 600)
    answered = hits[:, -1] > 0.5
    hits = hits[answered]
    for percent in (1, 25, 50, 99, 100):
        wanted = hits[:, -1:] * percent / 100
        place = torch.searchsorted(hits, wanted - 1e-9)  # items before, so the next one reaches it
        reached = hits.gather(1, place)
        before = torch.where(place > 0, hits.gather(1, (place - 1).clamp_min(0)), 0)
        at = place + (wanted - before) / (reached - before)
        expected = (wanted / at).mean().item()
        assert figures.precision_at_recall[percent - 1] == pytest.approx(expected, rel=0.03)


def test_precision_at_exact_percentages_of_what_is_relevant():
    """7 of 100 relevant items, then 1,000 others, then the rest."""
    x = torch.arange(1100.0)[:, None]
    relevant = torch.ones(1100, dtype=torch.bool)
    relevant[7:1007] = False
    figures = evaluate.evaluate_vectors(x, relevant[:, None], torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    expected = [1.0 if percent <= 7 else percent / (1000 + percent) for percent in range(1, 101)]
    assert figures.precision_at_recall == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_equal_vectors_tie_in_whatever_order_they_come(metric):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 300, generator=generator).expand(1003, -1)
    labels = torch.zeros(1003, 1, dtype=torch.bool)
    labels[:100] = True
    asked = {"query": torch.randn(1, 300, generator=generator), "query_labels": labels[:1], "R": 100, "metric": metric}
    x = x * 2.0 ** (torch.arange(1003)[:, None] % 40) if metric == "cosine" else x  # one direction, to the bit
    first, last = (evaluate.evaluate_vectors(x, order, **asked) for order in (labels, labels.flip(0)))
    assert first == last


def test_vectors_of_any_size_are_ranked_as_those_in_float64():
    generator = torch.Generator().manual_seed(0)
    query, x = torch.randn(4, 8, generator=generator), torch.randn(60, 8, generator=generator)
    labels = torch.eye(4, dtype=torch.bool)[torch.arange(60) % 4]
    asked = {"labels": labels, "query_labels": labels[:4]}
    expected = evaluate.evaluate_vectors(x.double(), query=query.double(), **asked)
    for shift, factor in ((0, 1.0), (0, 1e18), (1000, 1.0)):
        found = evaluate.evaluate_vectors(x * factor + shift, query=query * factor + shift, **asked)
        assert found.mean_average_precision == pytest.approx(expected.mean_average_precision, abs=1e-3)
    found = evaluate.evaluate_vectors((300 * x).half(), query=(300 * query).half(), **asked)
    assert found.mean_average_precision == pytest.approx(expected.mean_average_precision, abs=0.02)
    for metric in ("l2", "ip", "cosine"):
        with pytest.raises(
            ValueError, match=r"^evaluate_vectors: x must be small enough for its squares in torch.floa"
        ):
            evaluate.evaluate_vectors(x * 1e20, query=query, metric=metric, **asked)
        with pytest.raises(ValueError, match=r"^evaluate_vectors: query must be small enough for its squares"):
            evaluate.evaluate_vectors(x, query=query * 1e20, metric=metric, **asked)
    with pytest.raises(ValueError, match=r"must be at least one of each, got 0 and 4\.$"):
        evaluate.evaluate_vectors(x[:0], labels[:0], query, labels[:4])
    with pytest.raises(ValueError, match=r"^evaluate_vectors: copies must be row numbers in 0\.\.59"):
        evaluate.evaluate_vectors(x, query=query, copies=torch.full((60,), 60), **asked)


def test_tables_of_a_cut_through_a_large_tie_have_a_bound(monkeypatch):
    sizes = []
    whole = evaluate._expectation

    def watched(precisions, *rest):
        sizes.append(len(precisions) * 6001)  # up to 6,000 relevant items may be inside
        return whole(precisions, *rest)

    monkeypatch.setattr(evaluate, "_expectation", watched)
    relevant = torch.zeros(1, 12_000, dtype=torch.bool)
    relevant[:, ::2] = True
    one = average_precision(torch.zeros(1, 12_000), relevant, R=10_000)
    many = average_precision(torch.zeros(300, 12_000), relevant.expand(300, -1), R=10_000)
    assert torch.equal(many, one.expand(300))
    assert len(sizes) > 2
    assert max(sizes) <= evaluate._ENTRIES


def test_vectors_and_copies_of_them():
    layer, codes, labels, query, query_labels = random_codes(2)
    distinct, copies = torch.unique(codes, dim=0, return_inverse=True)
    x = layer.decode(distinct)
    by_code = evaluate.evaluate_codes(layer, codes, labels, query, query_labels, R=70)[-1]
    by_vector = evaluate.evaluate_vectors(x, labels, query, query_labels, R=70, copies=copies)
    assert by_vector.mean_average_precision == pytest.approx(by_code.mean_average_precision, abs=1e-6)
    for metric, largest in (("l2", False), ("ip", True), ("cosine", True)):
        scores = torch.cdist(query, x[copies]) if metric == "l2" else query @ x[copies].T
        scores = torch.cosine_similarity(query[:, None], x[copies], dim=2) if metric == "cosine" else scores
        relevant = (query_labels.float() @ labels.float().T) > 0
        figures = evaluate.evaluate_vectors(x, labels, query, query_labels, metric=metric, copies=copies)
        expected = average_precision(scores, relevant, largest=largest).mean().item()
        assert figures.mean_average_precision == pytest.approx(expected, abs=1e-3)


def test_one_length_alone_and_any_number_of_threads():
    layer, *data = random_codes(3)
    every = evaluate.evaluate_codes(layer, *data, R=70, metric="ip")
    assert [evaluate.evaluate_codes(layer, *data, R=70, metric="ip", levels=L) for L in (1, 2, 3)] == [
        [f] for f in every
    ]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert evaluate.evaluate_codes(layer, *data, R=70, metric="ip") == every
    finally:
        torch.set_num_threads(threads)
    with pytest.raises(ValueError, match=r"^evaluate_codes: levels must be an integer from 1 to 3, got 4\.$"):
        evaluate.evaluate_codes(layer, *data, levels=4)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_norms_are_computed_once_for_all_batches_of_queries(monkeypatch, backend):
    layer, *data = random_codes(4)
    expected = evaluate.evaluate_codes(layer, *data, R=70, levels=3)[0].mean_average_precision
    asked, choose = [], drq_fast.backends.choose_for_norms
    monkeypatch.setattr(drq_fast.backends, "choose_for_norms", lambda *a: asked.append(a) or choose(*a))
    monkeypatch.setattr(evaluate, "_ENTRIES", 1)  # a query at a time
    for name in ("native", "torch"):  # adc computes them where they are not given
        norms = getattr(drq_fast.backends, "plain_torch" if name == "torch" else name)
        monkeypatch.setattr(norms, "adc", given_norms(norms.adc))
    with drq_fast.use_backend(backend):
        found = evaluate.evaluate_codes(layer, *data, R=70, levels=3)[0].mean_average_precision
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(asked) == 1


def given_norms(adc):
    def run(query, codes, codec, metric, norms):
        assert norms is not None
        return adc(query, codes, codec, metric, norms)

    return run


def test_costs_are_sorted_as_numbers():
    inf, tiny = float("inf"), 1e-45
    row = [3.0, -0.0, float("nan"), -2.5, inf, 0.0, -inf, tiny, -tiny, 2.0, -float("nan")]
    for dtype in (torch.float32, torch.float64):
        costs = torch.tensor([row, row[::-1]], dtype=dtype)
        ordered, order = evaluate._sorted(costs)
        known = torch.where(costs.isnan(), inf, costs).gather(1, order)
        assert torch.equal(known, known.sort(dim=1).values)
        assert torch.equal(order.sort(dim=1).values, torch.arange(11).expand(2, -1))
        equal = known[:, 1:] == known[:, :-1]
        assert torch.equal(ordered[:, 1:] == ordered[:, :-1], equal)
        assert equal.sum(dim=1).tolist() == [3, 3]  # two zeros; infinity and both NaN


def test_recall_by_hand():
    found = torch.tensor([[1, 2, 3], [4, 5, -1]])
    assert evaluate.recall(found, torch.tensor([[3, 9], [4, 5]])) == pytest.approx(3 / 4)
    with pytest.raises(ValueError, match=r"^recall: found and neighbours must be \[Q, k\] and \[Q, t\], got"):
        evaluate.recall(found, torch.tensor([[3, 9]]))


def test_wrong_arguments():
    layer, codes, labels, query, query_labels = random_codes(0)
    with pytest.raises(
        ValueError, match=r"^evaluate_codes: labels must be bool \[300, C\], got torch.bool \[299, 4\]\.$"
    ):
        evaluate.evaluate_codes(layer, codes, labels[1:], query, query_labels)
    with pytest.raises(ValueError, match=r"^evaluate_codes: query_labels must be \[Q, 4\], got \[9, 3\]\.$"):
        evaluate.evaluate_codes(layer, codes, labels, query, query_labels[:, 1:])
    with pytest.raises(ValueError, match=r"must be at least one of each, got 300 and 0\.$"):
        evaluate.evaluate_codes(layer, codes, labels, query[:0], query_labels[:0])
    with pytest.raises(ValueError, match=r"^evaluate_codes: R and depths must be an integer of at least 1, got 0\.$"):
        evaluate.evaluate_codes(layer, codes, labels, query, query_labels, R=0)
    with pytest.raises(ValueError, match=r"^evaluate_codes: query must be finite, got NaN or infinity in row 0\.$"):
        evaluate.evaluate_codes(layer, codes, labels, query * float("nan"), query_labels)
    with pytest.raises(ValueError, match=r"^average_precision: scores must be numbers, got NaN\.$"):
        average_precision(torch.full((1, 2), float("nan")), torch.ones(1, 2, dtype=torch.bool))
