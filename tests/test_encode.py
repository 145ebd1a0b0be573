"""encode: greedy is the codes of quantize; a beam finds the best path by its weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from drq_fast import fit, functional, reference


@pytest.mark.parametrize(
    ("N", "D", "K", "M"), [(0, 3, 4, 2), (1, 1, 2, 1), (37, 5, 256, 4), (11, 7, 257, 3), (5, 3, 4096, 2)]
)
def test_greedy_gives_the_codes_of_quantize(codec, N, D, K, M):
    x, codebook, scale, offset = codec(N, D, K, M)
    codes = functional.encode(x, codebook, scale, offset=offset)
    assert codes.dtype == (torch.uint8 if K <= 256 else torch.int32)
    assert torch.equal(codes.long(), functional.quantize(x, codebook, scale, gamma=1.0, offset=offset).codes)


def brute_force(x, codebook, scale, omega):
    """Every one of K^M paths, judged by sum_m omega_m d_m^2; ties to the smaller code."""
    paths = torch.tensor(list(itertools.product(range(len(codebook)), repeat=len(scale))))
    words = scale[:, None] * codebook[paths]  # [paths, M, D]
    errors = (x[:, None, None] - words.cumsum(dim=1)).square().sum(dim=3)  # [N, paths, M]
    return paths[(errors * omega).sum(dim=2).argmin(dim=1)]


@pytest.mark.parametrize("omega", [(1.0, 1.0, 1.0), (0.1, 0.1, 1.0), (0.0, 0.0, 1.0), (3.0, 1.0, 0.5)])
def test_a_beam_that_keeps_everything_is_exhaustive(codec, omega):
    x, codebook, scale, _ = codec(N=40, D=3, K=5, M=3, dtype=torch.float64)
    codes = functional.encode(x, codebook, scale, beam=25, level_weights=omega)
    assert torch.equal(codes.long(), brute_force(x, codebook, scale, torch.tensor(omega)))


def test_wider_beams_lower_the_error(codec):
    x, codebook, scale, _ = codec(N=400, D=16, K=32, M=4)
    errors = []
    for beam in (1, 4, 16):
        codes = functional.encode(x, codebook, scale, beam=beam, level_weights=(0, 0, 0, 1))
        errors.append(float((x - functional.decode(codes, codebook, scale)).square().sum()))
    assert errors[0] > errors[1] > errors[2]


def test_beam_one_is_greedy_whatever_the_weights(codec):
    x, codebook, scale, _ = codec()
    greedy = functional.encode(x, codebook, scale)
    assert torch.equal(greedy, functional.encode(x, codebook, scale, beam=1, level_weights=(0, 0, 1)))


def test_weight_on_the_first_level_alone_still_chooses_the_rest_well(codec):
    x, codebook, scale, _ = codec(N=60, dtype=torch.float64)
    greedy = functional.encode(x, codebook, scale)
    beam = functional.encode(x, codebook, scale, beam=4, level_weights=(1, 0, 0))
    assert torch.equal(beam[:, 0], greedy[:, 0])
    error = [(x - functional.decode(c, codebook, scale)).square().sum() for c in (greedy, beam)]
    assert error[1] <= error[0]


def test_beam_ties_go_to_the_lexicographically_smaller_code():
    codebook = torch.tensor([[1.0], [1.0], [3.0]])  # 0 and 1 are twins
    x = torch.tensor([[4.0]])
    assert functional.encode(x, codebook, torch.ones(2), beam=9).tolist() == [[2, 0]]
    assert functional.encode(x, codebook, torch.ones(2), beam=9, level_weights=(0, 1)).tolist() == [[0, 2]]


def test_beam_wider_than_there_are_paths_and_empty_input(codec):
    x, codebook, scale, _ = codec(N=6, K=2, M=2)
    assert functional.encode(x, codebook, scale, beam=100).shape == (6, 2)
    assert functional.encode(x[:0], codebook, scale, beam=3).shape == (0, 2)


def test_tiles_give_the_same_codes_as_one_piece(codec, monkeypatch):
    x, codebook, scale, offset = codec(N=1000, D=5, K=16, M=3, dtype=torch.float64)
    monkeypatch.setattr(fit, "_TILE", 100 * 16)
    tiled = fit.encode(x, codebook, scale, offset)
    assert torch.equal(tiled, reference.encode(x, codebook, scale, offset=offset))
