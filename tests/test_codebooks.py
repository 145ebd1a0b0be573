"""Levels with codewords of their own: the definition, every backend, the layer, fit, files and search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from drq_fast import Codec, Index, RecurrentQuantizer, SemanticIds, checks, fit, functional, refit
from drq_fast.backends.native import extension
from drq_fast.backends.types import Parameters, powers_of
from drq_fast.blocks import Blocks

needs_native = pytest.mark.skipif(extension.why_not("cpu") is not None, reason="the extension is not built")
SHAPES = [(4, 4, 9, 5), (6, 2, 16, 7), (6, (4, 2), 5, 3), (8, 8, 17, 12), (5, (1, 3, 1), 300, 6)]  # M, codebooks, K, D


def codec_of(M, codebooks, K, D, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    groups = checks.groups("test", codebooks, M)
    codebook = torch.randn((groups[-1] + 1) * K, D, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.8**m for m in powers_of(groups)], dtype=torch.float64)
    x, offset = torch.randn(400, D, generator=generator, dtype=torch.float64) + 1, torch.ones(D, dtype=torch.float64)
    return x.to(dtype), codebook.to(dtype), scale.to(dtype), offset.to(dtype)


def expanded(M, codebooks, K, codebook):
    """The codebook of each level."""
    return [codebook[group * K : (group + 1) * K] for group in checks.groups("test", codebooks, M)]


@pytest.mark.parametrize(("M", "codebooks", "K", "D"), SHAPES)
def test_the_definition_level_by_level(M, codebooks, K, D):
    x, codebook, scale, offset = codec_of(M, codebooks, K, D, torch.float64)
    codes = functional.encode(x, codebook, scale, offset=offset, codebooks=codebooks, backend="torch")
    h, x_hat = x - offset, offset.expand(x.shape)
    for m, words in enumerate(expanded(M, codebooks, K, codebook)):
        nearest = torch.cdist(h, scale[m] * words).argmin(dim=1)
        assert torch.equal(nearest, codes[:, m].long())
        h, x_hat = h - scale[m] * words[nearest], x_hat + scale[m] * words[nearest]
        prefix = functional.decode(codes, codebook, scale, offset=offset, codebooks=codebooks, levels=m + 1)
        torch.testing.assert_close(prefix, x_hat)
    errors = functional.squared_errors(x, codebook, scale, offset=offset, codebooks=codebooks).errors
    torch.testing.assert_close(errors[:, -1], 2 * h.square().sum(dim=1))
    inner = functional.adc(x[:7], codes, codebook, scale, offset=offset, codebooks=codebooks, metric="ip")
    torch.testing.assert_close(inner, x[:7] @ x_hat.T)
    distances = functional.adc(x[:7], codes, codebook, scale, offset=offset, codebooks=codebooks)
    torch.testing.assert_close(distances, torch.cdist(x[:7], x_hat).square())


@needs_native
@pytest.mark.parametrize("beam", [1, 3, 16])
@pytest.mark.parametrize(("M", "codebooks", "K", "D"), SHAPES)
def test_native_codes_are_those_of_the_definition(M, codebooks, K, D, beam):
    x, codebook, scale, offset = codec_of(M, codebooks, K, D)
    options = {"offset": offset, "codebooks": codebooks, "beam": beam}
    found, expected = (functional.encode(x, codebook, scale, **options, backend=b) for b in ("native", "torch"))
    assert (found == expected).all(dim=1).float().mean() > 0.99  # a tie within rounding may go either way
    decoded = (functional.decode(c, codebook, scale, offset=offset, codebooks=codebooks) for c in (found, expected))
    errors = [(x - each).square().sum() for each in decoded]
    torch.testing.assert_close(*errors, rtol=1e-3, atol=0)


def test_a_wider_beam_finds_better_codes():
    x, codebook, scale, offset = codec_of(8, 8, 17, 12)
    errors = []
    for beam in (1, 4, 32):
        codes = functional.encode(x, codebook, scale, offset=offset, codebooks=8, beam=beam)
        decoded = functional.decode(codes, codebook, scale, offset=offset, codebooks=8)
        errors.append(float((x - decoded).square().sum()))
    assert errors[0] > 1.02 * errors[1] > 1.02 * errors[2]


@needs_native
@pytest.mark.parametrize(("M", "codebooks", "K", "D"), SHAPES)
def test_gradients_are_those_of_the_definition(M, codebooks, K, D):
    gradients = []
    for backend in ("torch", "native"):
        inputs = [t.requires_grad_() for t in codec_of(M, codebooks, K, D)]
        x, codebook, scale, offset = inputs
        options = {"offset": offset, "codebooks": codebooks, "backend": backend}
        total = functional.squared_errors(x, codebook, scale, **options).errors.mean()
        total = total + functional.loss(x, codebook, scale, gamma=2.0, **options).loss
        total = total + functional.quantize(x, codebook, scale, gamma=2.0, **options).soft.square().mean()
        gradients.append(torch.autograd.grad(total, inputs))
    for expected, found in zip(*gradients, strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize(("M", "codebooks", "K", "D"), SHAPES)
def test_search_finds_what_exact_scores_of_decoded_vectors_rank_first(M, codebooks, K, D, metric, tmp_path):
    x, codebook, scale, offset = codec_of(M, codebooks, K, D)
    codec = Codec(codebook, scale, offset, codebooks=codebooks)
    index = Index(codec, metric=metric)
    index.add(x)
    for levels in (M, M - 1, 1):
        decoded = codec.decode(codec.encode(x), levels=levels).double()
        query = x[:9].double()
        scores = {"l2": -torch.cdist(query, decoded), "ip": query @ decoded.T}.get(metric)
        if scores is None:
            normal = torch.nn.functional.normalize
            scores = normal(query, dim=1) @ normal(decoded, dim=1).T
        found = index.search(x[:9], k=1, levels=levels)
        best = scores.max(dim=1).values
        assert torch.all(scores.gather(1, found.ids)[:, 0] >= best - 1e-4 * best.abs())
    index.save(tmp_path / "index.drq")
    again = Index.load(tmp_path / "index.drq")
    assert again.codec == codec
    assert torch.equal(again.search(x[:9], k=3).ids, index.search(x[:9], k=3).ids)


def test_prefix_of_a_codec_cuts_groups():
    x, codebook, scale, offset = codec_of(6, (4, 2), 5, 3)
    codec = Codec(codebook, scale, offset, codebooks=(4, 2))
    for levels in range(1, 7):
        prefix = codec.prefix(levels)
        assert torch.equal(prefix.encode(x), codec.encode(x)[:, :levels])
        assert torch.equal(prefix.decode(prefix.encode(x)), codec.decode(codec.encode(x), levels=levels))
    assert codec.prefix(5).sizes == (4, 1)
    assert codec.prefix(4).codebooks == 1


def test_codecs_of_other_libraries(tmp_path):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(9, 4, generator=generator) / 2**m for m in range(3)]
    codec = Codec.from_codebooks(parts)
    codes = torch.randint(9, (20, 3), generator=generator)
    torch.testing.assert_close(codec.decode(codes), sum(part[codes[:, m]] for m, part in enumerate(parts)))
    codec.save(tmp_path / "codec.drq")
    assert Codec.load(tmp_path / "codec.drq") == codec
    assert Codec.from_codebooks([part.numpy() for part in parts]) == codec
    assert repr(codec) == "Codec(dim=4, codewords=9, levels=3, codebooks=3, 12 bits)"
    with pytest.raises(ValueError, match=r"^from_codebooks: codebooks\[1\] must be \[K, D\] as all others"):
        Codec.from_codebooks([parts[0], parts[1][:8]])
    with pytest.raises(TypeError, match=r"^from_codebooks: codebooks must be a list of arrays"):
        Codec.from_codebooks(torch.stack(parts))


@pytest.mark.parametrize("codebooks", [3, 0, -1, 1.5, (4, 1), (2, 0, 2), "2", True])
def test_codebooks_that_do_not_divide_the_levels(codebooks):
    x, codebook, scale, _ = codec_of(4, 4, 9, 5)
    with pytest.raises(ValueError, match=r"^encode: codebooks must be a divisor of"):
        functional.encode(x, codebook, scale, codebooks=codebooks)


def test_a_codebook_that_cannot_be_divided():
    x, codebook, scale, _ = codec_of(4, 4, 9, 5)
    with pytest.raises(ValueError, match=r"^encode: codebook must be \[4 \* K, D\] .*, got \[35, 5\]"):
        functional.encode(x, codebook[1:], scale, codebooks=4)


@pytest.mark.parametrize("loss", ["squared", "paper"])
@pytest.mark.parametrize("scale", ["shared", "per_level"])
@pytest.mark.parametrize("codebooks", [2, 4])
def test_a_layer_learns_saves_and_loads(codebooks, scale, loss, tmp_path):
    torch.manual_seed(0)
    layer = RecurrentQuantizer(6, 16, 4, codebooks=codebooks, scale=scale, loss=loss)
    x = torch.randn(512, 6) * torch.tensor([3.0, 2, 1, 1, 1, 1]) + 1
    optimiser = torch.optim.Adam(layer.parameters(), 1e-2) if list(layer.parameters()) else None
    for step in range(30):
        quantized, codes, value = layer(x, levels=4 if step % 3 else 2)
        if optimiser:
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
    layer.eval()
    with torch.no_grad():
        quantized, codes, _ = layer(x)
    assert torch.equal(layer.decode(codes), quantized)
    torch.testing.assert_close(layer.embed(codes).sum(dim=-2), quantized)
    assert (x - quantized).square().mean() < 0.15 * x.var(dim=0).mean()
    assert layer.usage(codes).shape == (4, 16)
    layer.save(tmp_path / "layer.drq")
    again = RecurrentQuantizer.load(tmp_path / "layer.drq")
    assert torch.equal(again.encode(x), layer.encode(x))
    assert again.codebooks == codebooks
    assert torch.equal(layer.codec().encode(x), layer.encode(x))


def test_averages_move_each_codebook_to_its_own_residuals():
    torch.manual_seed(0)
    layer = RecurrentQuantizer(4, 8, 2, codebooks=2)
    x = torch.randn(256, 4)
    layer.initialise(x)
    with torch.no_grad():
        layer.codebook[3] = 100.0  # a dead codeword of level 0
        layer.codebook[8 + 5] = 100.0  # and one of level 1
    layer.forget()
    for _ in range(60):
        layer(x)
    sizes = layer.codebook.norm(dim=1)
    assert sizes[:8].max() < 6
    assert sizes[8:].max() < 0.8 * sizes[:8].max()  # those of level 1 are residuals


def test_revived_codewords_are_residuals_of_their_group():
    x, codebook, scale, _ = codec_of(4, 4, 9, 5)
    codec = Parameters(codebook, scale, None, checks.groups("test", 4, 4))
    codes = functional.encode_checked(x, codec, 1, None)
    unused = torch.zeros(36, dtype=torch.bool)
    unused[[2, 29]] = True
    revived = fit.revive(x, codes, codec, fit.seeded(0), unused)
    residuals = x - functional.decode_checked(codes[:, :3], codec.part(slice(0, 3)))
    assert (x == revived[2]).all(dim=1).any()
    assert torch.cdist(revived[29:30], residuals).min() < 1e-5
    assert torch.equal(revived[~unused], codebook[~unused])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_the_refit_minimises_the_error_for_given_codes(dense, direct, monkeypatch):
    monkeypatch.setattr(refit, "_STEPS", 200)
    if not direct:
        monkeypatch.setattr(refit, "_DIRECT", 1)
    if not dense:
        monkeypatch.setattr(refit, "_DENSE", 1)
        monkeypatch.setattr(refit, "_DIRECT", 1)
    x, codebook, scale, _ = codec_of(6, 2, 16, 7, torch.float64)
    groups, omega = checks.groups("test", 2, 6), torch.tensor([0.3, 0.1, 0.0, 0.2, 0.5, 1.0], dtype=torch.float64)
    codec = Parameters(codebook, scale, None, groups)
    block = fit.Block(x)
    block.codes = codes = functional.encode_checked(x, codec, 1, None)
    penalty = torch.linspace(0, 2, 32, dtype=torch.float64)

    def cost(words):
        decoded = [
            functional.decode_checked(codes[:, : m + 1], Parameters(words, scale, None, groups)) for m in range(6)
        ]
        errors = sum(w * (x - each).square().sum() for w, each in zip(omega, decoded, strict=True))
        return errors + (penalty[:, None] * words.square()).sum()

    for _ in range(4):  # the ridge keeps each refit a little short of the minimum
        statistics = refit.collect(x, codes, codec, x.square().sum())
        words = refit.codebook_of(statistics, Blocks([block]), codec, omega, penalty)
        codec = Parameters(words, scale, None, groups)
    words = codec.codebook.clone().requires_grad_()
    total = cost(words)
    (gradient,) = torch.autograd.grad(total, words)
    assert gradient.norm() < 1e-5 * total
    assert total < cost(codebook)


def test_more_codebooks_fit_better_and_prefixes_stay_good():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6000, 8, generator=generator) * torch.linspace(2, 0.3, 8)
    train, test = x[:3000], x[3000:]
    errors = []
    for codebooks in (1, 2, 4):
        layer = RecurrentQuantizer(8, 32, 4, codebooks=codebooks)
        layer.fit(train, rounds=30, seed=0)
        codes = layer.encode(test, beam=8)
        errors.append([float((test - layer.decode(codes, levels=m)).square().mean()) for m in (1, 2, 4)])
    assert errors[0][2] > 1.03 * errors[1][2] > 1.03 * errors[2][2]
    assert errors[2][0] < 1.05 * errors[0][0]


def test_large_codebooks_are_refitted():
    """Above the sizes whose normal equations are formed, codewords used to stay as drawn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30_000, 4, generator=generator)
    drawn, fitted = (fit.fit(x, 9000, 1, rounds=rounds, seed=0, noise=0.0) for rounds in (1, 4))
    assert fitted.errors[0] < 0.9 * drawn.errors[0]


def test_semantic_ids_are_unique(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    layer = RecurrentQuantizer(6, 8, 3, codebooks=3)
    layer.fit(x, rounds=5, seed=0)
    ids = SemanticIds.build(layer.codec(), x)
    codes = np.asarray(ids.codes)
    assert len({tuple(code) for code in codes.tolist()}) == 300
    ids.save(tmp_path / "ids.drq")
    assert SemanticIds.load(tmp_path / "ids.drq").codec == ids.codec


def test_lists_and_filters(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 8, generator=generator)
    index = Index.build(x, bits=32, codebooks=4, lists=8, seed=0)
    assert index.codec.codebooks == 4
    exact = torch.cdist(x[:20], index.reconstruct(torch.arange(4000)))
    found = index.search(x[:20], k=5, probes=8)
    nearest = exact.topk(5, dim=1, largest=False).values
    torch.testing.assert_close(exact.gather(1, found.ids), nearest, rtol=1e-3, atol=1e-3)
    for k, probes in itertools.product((1, 10), (1, 3, 8)):
        torch.testing.assert_close(
            index.search(x[:3], k=k, probes=probes).scores,
            torch.cat([index.search(x[q : q + 1], k=k, probes=probes).scores for q in range(3)]),
            rtol=0,
            atol=0,
        )
