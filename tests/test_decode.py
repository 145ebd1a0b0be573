"""decode: sums of scaled codewords, in plain torch and in Triton."""

from __future__ import annotations

import pytest
import torch

from drq_fast import BackendUnavailable, functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_by_hand():
    codebook, scale = torch.tensor([[0.0, 1.0], [2.0, 4.0]]), torch.tensor([1.0, 0.5, -0.25])
    codes = torch.tensor([[1, 0, 1]])
    assert functional.decode(codes, codebook, scale).tolist() == [[1.5, 3.5]]
    assert functional.decode(codes, codebook, scale, levels=1).tolist() == [[2, 4]]
    assert functional.decode(codes[:, :2], codebook, scale).tolist() == [[2, 4.5]]
    assert functional.decode(codes, codebook, scale, offset=torch.tensor([10.0, 20.0])).tolist() == [[11.5, 23.5]]


def test_decoded_codes_are_the_hard_approximation(codec):
    x, codebook, scale, offset = codec()
    quantized = functional.quantize(x, codebook, scale, gamma=1.0, offset=offset)
    torch.testing.assert_close(functional.decode(quantized.codes, codebook, scale, offset=offset), quantized.hard)


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"])
def test_any_integer_dtype(codec, name):
    x, codebook, scale, _ = codec()
    codes = functional.encode(x, codebook, scale)
    converted = codes.to(getattr(torch, name))
    assert torch.equal(functional.decode(converted, codebook, scale), functional.decode(codes, codebook, scale))


def test_gradcheck(codec):
    x, codebook, scale, offset = codec(4, 3, 5, 3, torch.float64)
    codes = functional.encode(x, codebook, scale)
    leaves = [t.requires_grad_() for t in (codebook, scale, offset)]
    assert torch.autograd.gradcheck(lambda c, s, o: functional.decode(codes, c, s, offset=o), leaves)


@pytest.mark.parametrize(("N", "D", "K", "M"), [(0, 3, 4, 2), (1, 1, 2, 1), (17, 130, 256, 4), (33, 7, 300, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_gives_the_bits_of_the_reference(codec, N, D, K, M, dtype):
    pytest.importorskip("triton")
    x, codebook, scale, offset = (t.to(DEVICE) for t in codec(N, D, K, M, dtype))
    codes = functional.encode(x, codebook, scale)
    for shift in (None, offset):
        expected = functional.decode(codes, codebook, scale, offset=shift, backend="torch")
        actual = functional.decode(codes, codebook, scale, offset=shift, backend="triton")
        if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts bits off where a GPU rounds
            torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(actual, expected)


def test_triton_refuses_what_it_cannot_do(codec):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec())
    codes = functional.encode(x, codebook, scale)
    with pytest.raises(BackendUnavailable, match="it gives no gradient"):
        functional.decode(codes, codebook.clone().requires_grad_(), scale, backend="triton")
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        functional.decode(codes, codebook.double(), scale.double(), backend="triton")
