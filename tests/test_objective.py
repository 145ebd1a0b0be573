"""What forward offers beside quantized, codes and loss: levels and masks by vector, losses by row and by level."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drq_fast import Index, RecurrentQuantizer, functional

D, K, M = 6, 16, 3


def data(N: int = 600, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=generator) @ torch.randn(D, D, generator=generator) + 3


@pytest.fixture(params=["squared", "paper"])
def layer(request) -> RecurrentQuantizer:
    """With parameters for an optimiser; tests/test_ema.py has the other."""
    torch.manual_seed(0)
    layer = RecurrentQuantizer(D, K, M, loss=request.param, update="gradient")
    layer.initialise(data())
    return layer


def gradients(layer: RecurrentQuantizer, loss: torch.Tensor) -> list[torch.Tensor]:
    return torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_squared_loss_is_the_mean_over_levels_of_mean_squared_errors():
    layer = RecurrentQuantizer(D, K, M, commitment=0.25).eval()
    layer.initialise(data())
    x, codes = data(50), layer.encode(data(50))
    by_level = [(x - layer.decode(codes, levels=m)).square().mean() for m in (1, 2, 3)]
    assert layer(x).loss.item() == pytest.approx(1.25 * float(sum(by_level)) / 3, rel=1e-5)
    assert layer(x, levels=2).loss.item() == pytest.approx(1.25 * float(sum(by_level[:2])) / 2, rel=1e-5)
    layer.level_weights = (1.0, 0.0, 3.0)
    assert layer(x).loss.item() == pytest.approx(1.25 * float(by_level[0] + 3 * by_level[2]) / 4, rel=1e-5)
    assert layer(x, reduction="level").loss.tolist() == pytest.approx([1.25 * float(e) for e in by_level], rel=1e-5)


def pulled(
    given: torch.Tensor, weight: float = 0.0, **options
) -> tuple[RecurrentQuantizer, torch.Tensor, torch.Tensor]:
    """A layer with running averages, x [50, D] and its gradient: `given` reaches quantized, `weight` the loss."""
    torch.manual_seed(0)
    layer = RecurrentQuantizer(D, K, M, **options)
    layer.initialise(data())
    x = data(50).requires_grad_()
    quantized, _, loss = layer(x)
    ((quantized * given).sum() + weight * loss).backward()
    return layer.eval(), x.detach(), x.grad


@pytest.mark.parametrize("weights", [None, (1.0, 0.0, 3.0)])
def test_the_gradient_of_quantized_pulls_x_to_its_approximations(weights):
    given = torch.randn(50, D, generator=torch.Generator().manual_seed(1))
    layer, x, gradient = pulled(given, level_weights=weights)
    omega = torch.tensor(weights or (1.0, 1.0, 1.0))
    h = torch.stack([x - layer.decode(layer.encode(x), levels=m) for m in (1, 2, 3)])  # [M, 50, D]
    distance = torch.sqrt((omega[:, None, None] * h.square()).sum() / omega.sum())
    pull = 0.2 * given.norm() * (omega[:, None, None] * h).sum(dim=0) / omega.sum() / distance
    torch.testing.assert_close(gradient - given, pull, rtol=1e-4, atol=1e-5)
    assert pull.norm() < 0.2 * given.norm()


def test_the_pull_has_the_units_of_the_gradient_and_adds_to_the_loss():
    given, nothing = torch.randn(50, D, generator=torch.Generator().manual_seed(1)), torch.zeros(50, D)
    _, _, gradient = pulled(given)
    assert torch.equal(pulled(1024 * given)[2], 1024 * gradient)  # a power of two: nothing is rounded
    of_loss = pulled(nothing, weight=7.0)[2]
    assert of_loss.norm() > 0
    torch.testing.assert_close(pulled(given, weight=7.0)[2], gradient + of_loss, rtol=1e-5, atol=1e-5)
    alone = pulled(nothing, weight=7.0, pull=0.0)[2]  # commitment 1 instead of 0.02
    torch.testing.assert_close(50 * of_loss, alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(pulled(given, pull=0.0)[2], given)
    torch.testing.assert_close(pulled(given, pull=0.4)[2] - given, 2 * (gradient - given), rtol=1e-4, atol=1e-5)
    for options in ({"pull": -1}, {"pull": "0.2"}, {"pull": 0.2, "update": "gradient"}, {"pull": 0, "loss": "paper"}):
        with pytest.raises(ValueError, match="RecurrentQuantizer: pull must be"):
            RecurrentQuantizer(D, K, M, **options)


def test_the_commitment_beside_the_pull_keeps_latents_from_growing():
    """The pull has no scale of its own: without a commitment, x grows for as long as it is trained."""

    def sizes(**options) -> list[float]:
        torch.manual_seed(0)
        encoder, decoder, layer = nn.Linear(D, D), nn.Linear(D, D), RecurrentQuantizer(D, K, M, **options)
        optimiser = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        x, found = data() / 4, []
        for step in range(1500):
            quantized, _, loss = layer(encoder(x))
            optimiser.zero_grad()
            ((decoder(quantized) - x).square().mean() + loss).backward()
            optimiser.step()
            if step in (749, 1499):
                found.append(float(encoder(x).detach().std()))
        return found

    free, held = sizes(commitment=0.0), sizes()
    assert free[1] > 1.3 * free[0]
    assert held[1] < 1.25 * held[0]


def test_nothing_pulls_masked_vectors_nor_exact_hits():
    mask = torch.tensor([True, True, False, False, True])
    for added, where in ((0.0, torch.zeros(5, dtype=torch.bool)), (0.1, mask)):
        torch.manual_seed(0)
        layer = RecurrentQuantizer(D, K, 1, offset=False, init="random", gamma=1.0)
        x = (layer.codebook[:5] + added).requires_grad_()
        layer(x, mask=mask).quantized.backward(torch.ones(5, D))
        assert torch.equal((x.grad != 1).all(dim=1), where)
        assert torch.equal(x.grad[~where], torch.ones(5, D)[~where])


def test_the_squared_loss_trains_the_codec_and_pulls_x():
    layer = RecurrentQuantizer(D, K, M, update="gradient", commitment=1.0)
    layer.initialise(data())
    x = data(50).requires_grad_()
    layer(x, reconstruct=False).loss.backward()
    x_hat = [layer.decode(layer.encode(x.detach()), levels=m) for m in (1, 2, 3)]
    pull = sum(2 * (x.detach() - each) for each in x_hat) / (3 * 50 * D)
    torch.testing.assert_close(x.grad, pull, rtol=1e-4, atol=1e-6)
    assert all(p.grad.abs().sum() > 0 for p in layer.parameters())


def test_losses_of_rows_average_to_the_loss(layer):
    x = data(40).view(5, 8, D)
    whole, rows = layer(x).loss, layer(x, reduction="row").loss
    assert rows.shape == (5, 8)
    torch.testing.assert_close(rows.mean(), whole, rtol=1e-5, atol=1e-6)
    assert_same(gradients(layer, rows.mean()), gradients(layer, whole))
    alone = layer(x[2, 3:4]).loss
    torch.testing.assert_close(rows[2, 3], alone, rtol=1e-5, atol=1e-6)


def test_masked_vectors_count_nowhere(layer):
    x = data(40).view(5, 8, D)
    mask = torch.rand(5, 8, generator=torch.Generator().manual_seed(1)) < 0.6
    x[~mask] = float("nan")  # padding may hold anything
    quantized, codes, loss = layer(x, mask=mask)
    expected = layer(x[mask])
    assert torch.equal(codes[mask], expected.codes)
    assert bool((codes[~mask] == -1).all())
    assert torch.equal(quantized[mask], expected.quantized)
    assert bool(quantized[~mask].isnan().all())
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert_same(gradients(layer, loss), gradients(layer, expected.loss))
    rows = layer(x, mask=mask, reduction="row").loss
    torch.testing.assert_close(rows[mask], layer(x[mask], reduction="row").loss, rtol=1e-5, atol=1e-6)
    assert bool((rows[~mask] == 0).all())
    assert torch.equal(layer.usage(codes), layer.usage(expected.codes))
    nothing = layer(x, mask=torch.zeros_like(mask))
    assert nothing.loss.item() == 0
    assert all(bool(g.isfinite().all()) for g in gradients(layer, nothing.loss))


def test_an_uninitialised_layer_starts_from_what_the_mask_leaves():
    x = data(200)
    x[100:] = 1e6
    layer = RecurrentQuantizer(D, K, M)
    layer(x, mask=torch.arange(200) < 100)
    assert layer.codebook.detach().abs().max() < 1e3


def test_every_vector_may_have_its_own_number_of_levels(layer):
    x = data(40).view(5, 8, D)
    levels = torch.randint(1, M + 1, (5, 8), generator=torch.Generator().manual_seed(2))
    quantized, codes, _ = layer(x, levels=levels)
    rows = layer(x, levels=levels, reduction="row").loss
    assert codes.shape == (5, 8, M)
    for L in (1, 2, 3):
        chosen = levels == L
        assert torch.equal(quantized[chosen], layer.decode(codes[chosen], levels=L))
        torch.testing.assert_close(rows[chosen], layer(x[chosen], levels=L, reduction="row").loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.decode(codes, levels=levels), quantized)
    assert np.array_equal(layer.codec().decode(codes.numpy(), levels=levels), quantized.detach().numpy())


def test_embeddings_of_levels_add_up_to_the_decoded_vector(layer):
    codes = layer.encode(data(20)).view(4, 5, M)
    embedded = layer.embed(codes)
    assert embedded.shape == (4, 5, M, D)
    torch.testing.assert_close(embedded.sum(dim=-2), layer.decode(codes))
    torch.testing.assert_close(layer.embed(codes[..., :2]).sum(dim=-2), layer.decode(codes, levels=2))
    embedded.square().sum().backward()
    assert all(p.grad is not None for p in (layer.codebook, layer.w, layer.offset))


def test_encode_to_fewer_levels(layer):
    x = data(30)
    assert torch.equal(layer.encode(x, levels=2), layer.encode(x)[:, :2])
    prefix = layer.codec().prefix(2)
    assert torch.equal(layer.encode(x, beam=4, levels=2), prefix.encode(x, beam=4))
    assert torch.equal(layer.codec().encode(x, beam=4, levels=2), prefix.encode(x, beam=4))


def test_perplexity(layer):
    codes = torch.tensor([[0, 1, 2], [1, 1, 2], [2, 3, 2], [3, 3, 2]])
    assert layer.perplexity(codes).tolist() == pytest.approx([4.0, 2.0, 1.0])


def test_only_codewords_that_many_batches_did_not_use_are_revived(layer):
    codes = [layer.encode(data(600)[first : first + 3]) for first in (0, 3)]
    seen = torch.cat(codes).long().flatten().unique()
    few = codes[0].long().flatten().unique()
    assert len(few) < len(seen) < K
    for each in codes:
        layer.observe(each)
    layer.observe(torch.full((5, M), -1))  # masked vectors
    before = layer.codebook.detach().clone()
    assert layer.revive(data(40, 0), seed=0) == K - len(seen)
    assert torch.equal(layer.codebook[seen], before[seen])
    assert int(layer._observed.sum()) == 0
    layer.observe(torch.zeros(1, M, dtype=torch.int64))
    assert layer.revive(data(40, 0), seed=0) >= K - 1  # all but codeword 0, of which some may stay what they were


def test_counts_are_part_of_the_state(layer):
    layer.observe(layer.encode(data(40)))
    other = RecurrentQuantizer(D, K, M, loss=layer.loss, update="gradient")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other._observed, layer._observed)
    old = {name: value for name, value in layer.state_dict().items() if name != "_observed"}
    nn.Sequential(other).load_state_dict({f"0.{name}": value for name, value in old.items()})
    assert int(other._observed.sum()) == 0


def test_gradient_checkpointing(layer):
    x, y = data(30).requires_grad_(), data(30).requires_grad_()
    out = checkpoint(lambda v: layer(v)[::2], x, use_reentrant=False)
    (out[0].square().sum() + out[1]).backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    plain = layer(y)
    (plain.quantized.square().sum() + plain.loss).backward()
    assert torch.equal(x.grad, y.grad)
    assert all(torch.equal(a, p.grad) for a, p in zip(found, layer.parameters(), strict=True))


def test_few_vectors_for_many_codewords_warn():
    with pytest.warns(UserWarning, match=r"^initialise: 40 vectors are few for 16 codewords; before training, call "):
        RecurrentQuantizer(D, K, M)(data(40))
    few = r"40 vectors are few for {} codewords; use at least {}\.$"
    with pytest.warns(UserWarning, match="^fit: " + few.format(16, 64)):
        RecurrentQuantizer(D, K, M).fit(data(40), rounds=1)
    with pytest.warns(UserWarning, match="^build: " + few.format(256, 1024)):
        Index.build(data(40), bits=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RecurrentQuantizer(D, K, M).fit(data(64), rounds=1)


def test_large_codebooks_train():
    layer = RecurrentQuantizer(4, 16384, 2, init="random", offset=False, gamma=1.0, update="gradient")
    x = torch.randn(20, 4).requires_grad_()
    quantized, codes, loss = layer(x)
    (loss + quantized.sum()).backward()
    assert torch.equal(codes, functional.encode(x, layer.codebook, layer.scale, backend="torch").long())
    assert int((layer.codebook.grad.abs().sum(dim=1) > 0).sum()) == len(codes.unique())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, x: q(x, mask=torch.ones(3, dtype=torch.bool)), r"mask must be \[40\] on cpu, got \[3\] on cpu\."),
        (lambda q, x: q(x, mask=torch.ones(40)), r"mask must be a bool tensor, got torch.float32\."),
        (lambda q, x: q(x, levels=4), r"levels must be an integer from 1 to 3, got 4\."),
        (lambda q, x: q(x, levels=torch.ones(3).long()), r"levels must be \[40\] on cpu, got \[3\] on cpu\."),
        (lambda q, x: q(x, levels=torch.zeros(40).long()), r"levels must be in 1..3, got values from 0 to 0\."),
        (lambda q, x: q(x, reduction="sum"), r"reduction must be one of 'mean', 'row', 'level', got 'sum'\."),
        (lambda q, x: RecurrentQuantizer(3, commitment=-1), r"commitment must be a finite number >= 0, got -1\."),
        (lambda q, x: RecurrentQuantizer(3, commitment=float("nan")), r"commitment must be a finite number >= 0"),
        (lambda q, x: RecurrentQuantizer(3, loss="l2"), r"loss must be one of 'squared', 'paper', got 'l2'\."),
        (lambda q, x: RecurrentQuantizer(3, weights=(1, 1, 1)), r'weights must be left out unless loss="paper", got'),
        (lambda q, x: RecurrentQuantizer(3, joint="mse"), r"joint must be left out unless"),
        (
            lambda q, x: RecurrentQuantizer(3, loss="paper", commitment=2),
            r'commitment must be left out unless loss="sq',
        ),
        (
            lambda q, x: RecurrentQuantizer(3, loss="paper", update="ema"),
            r"update must be \"gradient\" unless loss=\"squared\", got 'ema'\.",
        ),
        (lambda q, x: RecurrentQuantizer(3, update="sgd"), r"update must be one of 'ema', 'gradient', got 'sgd'\."),
        (
            lambda q, x: q.observe(torch.full((2, M), -7)),
            r"observe: codes must be in 0..15, got values from -7 to -7\.",
        ),
        (lambda q, x: q.embed(torch.full((2, M), K)), r"embed: codes must be in 0..15, got values from 16 to 16\."),
        (lambda q, x: q.observe(torch.full((2, M), K)), r"observe: codes must be in 0..15, got values from 16 to 16\."),
        (lambda q, x: q.revive(x, below=0), r"revive: below must be an integer from 1 to 9223372036854775807, got 0\."),
        (lambda q, x: q.revive(x, below=10**400), r"revive: below must be an integer from 1 to"),
        (lambda q, x: q(x, reconstruct=x), r"reconstruct must be True or False, got"),
        (lambda q, x: q.encode(x, levels=0), r"encode: levels must be an integer from 1 to 3, got 0\."),
    ],
)
def test_bad_input(call, message):
    layer = RecurrentQuantizer(D, K, M)
    layer.initialise(data())
    with pytest.raises((ValueError, TypeError), match=message):
        call(layer, data(40))


def test_the_loss_of_the_paper_has_no_levels():
    layer = RecurrentQuantizer(D, K, M, loss="paper")
    with pytest.raises(ValueError, match=r"reduction must be one of 'mean', 'row', got 'level'\."):
        layer(data(), reduction="level")
    assert not layer.initialised


@pytest.mark.parametrize("joint", ["gap", "mse"])
def test_masked_rows_have_no_loss_of_the_paper(joint):
    layer = RecurrentQuantizer(D, K, M, loss="paper", joint=joint)
    layer.initialise(data())
    mask = torch.arange(40) < 30
    rows = layer(data(40), mask=mask, reduction="row").loss
    assert bool((rows[30:] == 0).all())
    torch.testing.assert_close(rows[:30], layer(data(40)[:30], reduction="row").loss, rtol=1e-5, atol=1e-6)


def test_vmap(layer):
    x = data(40).view(5, 8, D)
    found = torch.func.vmap(lambda rows: layer(rows).quantized)(x)
    torch.testing.assert_close(found, layer(x).quantized)


def test_the_squared_loss_does_not_depend_on_the_threads():
    layer, losses, threads = RecurrentQuantizer(1, 4, 2, update="gradient"), [], torch.get_num_threads()
    x = torch.randn(300_001, 1, generator=torch.Generator().manual_seed(0))
    layer.initialise(x[:1000], seed=0)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            layer.zero_grad()
            loss = layer(x).loss
            loss.backward()
            losses.append((float(loss.detach()), float(layer.offset.grad)))
    finally:
        torch.set_num_threads(threads)
    assert losses[0] == losses[1] == losses[2]
