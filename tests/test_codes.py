"""Bit packing: any K, level 0 first, prefixes that are codes themselves."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drq_fast import codes as codes_module
from drq_fast import cut, pack, unpack
from drq_fast.codes import bits, packed_bytes


@st.composite
def packable(draw):
    codewords = draw(st.integers(2, 65536) | st.sampled_from([2, 3, 16, 255, 256, 257, 4096, 65535, 65536]))
    levels, rows = draw(st.integers(1, 16)), draw(st.integers(0, 9))
    numbers = st.integers(0, codewords - 1)
    codes = draw(st.lists(st.lists(numbers, min_size=levels, max_size=levels), min_size=rows, max_size=rows))
    return torch.tensor(codes, dtype=torch.int64).reshape(rows, levels), codewords


@given(packable())
def test_round_trip_and_prefixes(job):
    codes, codewords = job
    levels = codes.shape[1]
    packed = pack(codes, codewords)
    assert packed.shape == (len(codes), packed_bytes(codewords, levels))
    assert torch.equal(unpack(packed, codewords, levels).long(), codes)
    for length in range(1, levels + 1):
        assert torch.equal(cut(packed, codewords, length), pack(codes[:, :length], codewords))
        assert torch.equal(unpack(packed, codewords, length).long(), codes[:, :length])


@given(packable())
def test_the_bits_are_the_binary_numbers_one_after_another(job):
    codes, codewords = job
    width = bits(codewords)
    for code, row in zip(codes.tolist(), pack(codes, codewords).tolist(), strict=True):
        expected = "".join(f"{number:0{width}b}" for number in code)
        assert "".join(f"{byte:08b}" for byte in row).startswith(expected)


def test_lengths():
    assert [bits(K) for K in (2, 3, 4, 16, 255, 256, 257, 4096, 65536)] == [1, 2, 2, 4, 8, 8, 9, 12, 16]
    assert bits(4096, levels=4) == 48
    assert packed_bytes(8, 3) == 2


def test_leading_shapes_many_rows_and_dtypes():
    codes = torch.randint(300, (70000, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack(pack(codes, 300), 300, 3).long(), codes)
    cube = codes[:24].reshape(2, 3, 4, 3)
    assert torch.equal(unpack(pack(cube, 300), 300, 3).long(), cube)
    assert unpack(pack(codes % 256, 256), 256, 3).dtype == torch.uint8
    assert unpack(pack(codes, 300), 300, 3).dtype == torch.int32


def test_numpy_in_kind_and_unsigned_dtypes():
    codes = np.array([[5, 2, 7]], dtype=np.uint32)
    packed = pack(codes, 8)
    assert packed.tolist() == [[171, 128]]
    assert isinstance(packed, np.ndarray)
    assert unpack(packed, 8, 3).tolist() == codes.tolist()
    assert cut(packed, 8, 1).tolist() == [[160]]
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        assert pack(torch.tensor([[5, 2, 7]]).to(dtype), 8).tolist() == [[171, 128]]


def test_the_examples_in_the_docstrings():
    failures, examples = doctest.testmod(codes_module, extraglobs={"torch": torch})
    assert examples >= 4
    assert failures == 0


def test_any_kind_of_integer_counts_codewords_and_levels():
    codes = torch.tensor([[5, 2, 7]])
    packed = pack(codes, np.int64(8))
    assert torch.equal(unpack(packed, np.uint16(8), np.int32(2)).long(), codes[:, :2])
    assert cut(packed, np.int64(8), np.int64(1)).tolist() == [[160]]
    assert codes_module.bits(np.int64(256), np.int64(4)) == 32


def test_packing_copies():
    codes = torch.zeros(2, 2, dtype=torch.uint8)
    pack(codes, 256).fill_(7)
    assert codes.sum() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(torch.tensor([[0, 5]]), 5), r"pack: codes must be in 0..4, got values from 0 to 5\."),
        (lambda: pack(torch.tensor([[-1]]), 5), r"pack: codes must be in 0..4, got values from -1 to -1\."),
        (
            lambda: pack(torch.zeros(2, 0, dtype=torch.int64), 5),
            r"pack: codes must be \[..., M\] with M >= 1, got \[2, 0\]\.",
        ),
        (
            lambda: pack(torch.zeros(1, 1, dtype=torch.int64), 1),
            "pack: codewords must be an integer from 2 to 65536, got 1.",
        ),
        (lambda: unpack(torch.zeros(1, 1, dtype=torch.uint8), 256, 2), r"unpack: packed must be \[..., 2\] or longer"),
        (
            lambda: unpack(torch.tensor([[255]], dtype=torch.uint8), 5, 2),
            "unpack: packed codes must be in 0..4, got values",
        ),
        (
            lambda: cut(torch.zeros(1, 1, dtype=torch.uint8), 256, 0),
            "cut: levels must be an integer of at least 1, got 0.",
        ),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_types():
    with pytest.raises(TypeError, match=r"pack: codes must be integers, got float32\."):
        pack(torch.zeros(1, 1), 5)
    with pytest.raises(TypeError, match=r"unpack: packed must be a uint8 tensor, got torch.int64\."):
        unpack(torch.zeros(1, 1, dtype=torch.int64), 5, 1)
