"""Bad input to the functions and the layer: one sentence each, compared to the letter."""

from __future__ import annotations

import gc
import re
import warnings

import numpy as np
import pytest
import torch

from drq_fast import RecurrentQuantizer, checks
from drq_fast import functional as F

X, C = (torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (7, 4))
S, SHIFT = torch.ones(2), torch.zeros(3)
BAD = X.clone().index_fill_(0, torch.tensor([0]), float("nan"))
B = torch.zeros(7, 2, dtype=torch.int64)
META = torch.device("meta")


def layer() -> RecurrentQuantizer:
    made = RecurrentQuantizer(3, 4, 2)
    made.initialise(X)
    return made


VALUE = [
    (lambda: F.quantize(X, C, S, gamma=0), "quantize: gamma must be a finite number above 0, got 0."),
    (lambda: F.quantize(X, C, S, gamma=float("nan")), "quantize: gamma must be a finite number above 0, got nan."),
    (lambda: F.quantize(X[0], C, S, gamma=1), "quantize: x must be [N, 3], got [3]."),
    (lambda: F.quantize(X[:, :2], C, S, gamma=1), "quantize: x must be [N, 3], got [7, 2]."),
    (lambda: F.distortion(X, C[:1], S, gamma=1), "distortion: codebook must be [K, D] with K from 2 to 65536 and D >= 1, got [1, 3]."),
    (lambda: F.distortion(X, C, S[:0], gamma=1), "distortion: scale must be [M] with M >= 1, got [0]."),
    (lambda: F.distortion(X, C, S, gamma=1, offset=SHIFT[:2]), "distortion: offset must be [3], one entry per dimension of the codebook, got [2]."),
    (lambda: F.distortion(X.to(META), C, S, gamma=1), "distortion: x must be on cpu, like the codebook, got a tensor on meta."),
    (lambda: F.encode(X, C, S.to(META)), "encode: scale must be on cpu, like the codebook, got a tensor on meta."),
    (lambda: F.encode(X, C, S, beam=0), "encode: beam must be an integer from 1 to 4096, got 0."),
    (lambda: F.encode(X, C, S, beam=10**9), "encode: beam must be an integer from 1 to 4096, got 1000000000."),
    (lambda: F.encode(X, C, S, level_weights=(1e300, 1)), "encode: level_weights must be numbers that float32 can represent and add, got (1e+300, 1.0)."),
    (lambda: F.encode(X, C, S, level_weights=(3e38, 3e38)), "encode: level_weights must be numbers that float32 can represent and add, got (3e+38, 3e+38)."),
    (lambda: F.loss(X, C, S, gamma=1, level_weights=(1e-60, 0)), "loss: level_weights must be numbers that float32 can represent and add, got (1e-60, 0.0)."),
    (lambda: F.loss(X, C, S, gamma=1, weights=(1e300, 0, 1)), "loss: weights must be numbers that float32 can represent and add, got (1e+300, 0.0, 1.0)."),
    (lambda: F.encode(X, C, S, beam=2, level_weights=(1,)), "encode: level_weights must be 2 finite numbers >= 0, not all of them 0, got (1.0,)."),
    (lambda: F.encode(X, C, S, beam=2, level_weights=(1, -1)), "encode: level_weights must be 2 finite numbers >= 0, not all of them 0, got (1.0, -1.0)."),
    (lambda: F.encode(X, C, S, beam=2, level_weights=(0, 0)), "encode: level_weights must be 2 finite numbers >= 0, not all of them 0, got (0.0, 0.0)."),
    (lambda: F.decode(B + 4, C, S), "decode: codes must be in 0..3, got values from 4 to 4."),
    (lambda: F.decode(B - 1, C, S), "decode: codes must be in 0..3, got values from -1 to -1."),
    (lambda: F.decode(B[0], C, S), "decode: codes must be [N, levels] with 1 to 2 levels, got [2]."),
    (lambda: F.decode(B.repeat(1, 2), C, S), "decode: codes must be [N, levels] with 1 to 2 levels, got [7, 4]."),
    (lambda: F.decode(B, C, S, levels=3), "decode: levels must be an integer from 1 to 2, got 3."),
    (lambda: F.decode(B.to(META), C, S), "decode: codes must be on cpu, like the codebook, got a tensor on meta."),
    (lambda: F.adc(X, B, C, S, metric="L2"), "adc: metric must be one of 'l2', 'ip', 'cosine', got 'L2'."),
    (lambda: F.adc(X, B, C, S, norms=torch.ones(3)), "adc: norms must be [7], one per code, got [3]."),
    (lambda: F.adc(X, B, C, S, levels=0), "adc: levels must be an integer from 1 to 2, got 0."),
    (lambda: F.search(X, B, C, S, k=0), "search: k must be an integer of at least 1, got 0."),
    (lambda: F.search(X, B, C, S, k=1, keep=torch.ones(3, dtype=torch.bool)), "search: keep must be [7], one per code, got [3]."),
    (lambda: F.search(X, B + 9, C, S, k=1), "search: codes must be in 0..3, got values from 9 to 9."),
    (lambda: F.search(X, B, C, S, k=1, backend="faiss"), "search: backend must be one of 'torch', 'native', 'triton', got 'faiss'."),
    (lambda: RecurrentQuantizer(0), "RecurrentQuantizer: dim must be an integer of at least 1, got 0."),
    (lambda: RecurrentQuantizer(3, codewords=1), "RecurrentQuantizer: codewords must be an integer from 2 to 65536, got 1."),
    (lambda: RecurrentQuantizer(3, levels=0), "RecurrentQuantizer: levels must be an integer of at least 1, got 0."),
    (lambda: RecurrentQuantizer(3, scale="free"), "RecurrentQuantizer: scale must be one of 'shared', 'per_level', got 'free'."),
    (lambda: RecurrentQuantizer(3, gamma=-1), "RecurrentQuantizer: gamma must be a finite number above 0, got -1."),
    (lambda: RecurrentQuantizer(3, loss="paper", weights=(1, -1, 1)), "RecurrentQuantizer: weights must be finite numbers >= 0, got (1.0, -1.0, 1.0)."),
    (lambda: RecurrentQuantizer(3, level_weights=(1, 2)), "RecurrentQuantizer: level_weights must be 4 finite numbers >= 0, not all of them 0, got (1.0, 2.0)."),
    (lambda: layer()(X[:, :2]), "RecurrentQuantizer: x must be [..., 3], got [7, 2]."),
    (lambda: layer()(X, levels=3), "RecurrentQuantizer: levels must be an integer from 1 to 2, got 3."),
    (lambda: RecurrentQuantizer(3, 4, 2, level_weights=(0, 1))(X, levels=1), "RecurrentQuantizer: level_weights must be above 0 somewhere in the first 1 levels, got (0.0, 1.0)."),
    (lambda: layer()(X.to(META)), "RecurrentQuantizer: x must be on cpu, like the codebook, got a tensor on meta."),
    (lambda: layer().initialise(X[:0]), "initialise: x must be at least one vector, got none."),
    (lambda: layer().initialise(BAD), "initialise: x must be finite, got NaN or infinity in row 0."),
    (lambda: layer().revive(BAD), "revive: x must be finite, got NaN or infinity in row 0."),
    (lambda: layer().encode(X[:, :2]), "encode: x must be [..., 3], got [7, 2]."),
    (lambda: layer().decode(B + 4), "decode: codes must be in 0..3, got values from 4 to 4."),
    (lambda: layer().decode(B.repeat(1, 2)), "decode: codes must be [..., 1 to 2 levels], got [7, 4]."),
    (lambda: layer().encode(X, beam=4097), "encode: beam must be an integer from 1 to 4096, got 4097."),
    (lambda: layer().fit(X, beam=5_000_000), "fit: beam must be an integer from 1 to 4096, got 5000000."),
    (lambda: layer().fit(X, seed=2**64), "fit: seed must be an integer from 0 to 18446744073709551615, got 18446744073709551616."),
    (lambda: layer().initialise(X * 1e20), "initialise: x must be scaled to a largest magnitude from 1e-12 to 1e12, got 2e+20."),
    (lambda: layer().fit(X * 1e-18), "fit: x must be scaled to a largest magnitude from 1e-12 to 1e12, got 2e-18."),
    (lambda: layer().usage(torch.empty(0, dtype=torch.int64)), "usage: codes must be [..., 1 to 2 levels], got [0]."),
    (lambda: layer().usage(B + 4), "usage: codes must be in 0..3, got values from 4 to 4."),
]  # fmt: skip

TYPE = [
    (lambda: F.quantize(X.int(), C, S, gamma=1), "quantize: x must be a float tensor, got torch.int32."),
    (lambda: F.quantize([[1.0]], C, S, gamma=1), "quantize: x must be a torch.Tensor, got list."),
    (lambda: F.quantize(X, C.long(), S, gamma=1), "quantize: codebook must be a float tensor, got torch.int64."),
    (lambda: F.encode(X, C, S, beam=1.0), "encode: beam must be an integer from 1 to 4096, got 1.0."),
    (lambda: F.encode(X, C, S, level_weights="ab"), "encode: level_weights must be 2 numbers, got 'ab'."),
    (lambda: F.decode(B.float(), C, S), "decode: codes must be integers, got float32."),
    (lambda: F.decode(B.bool(), C, S), "decode: codes must be integers, got bool."),
    (lambda: F.search(X, B, C, S, k=1, keep=B[:, 0]), "search: keep must be a bool tensor, got torch.int64."),
    (lambda: F.search(X, B, C, S, k="ten"), "search: k must be an integer of at least 1, got 'ten'."),
    (lambda: RecurrentQuantizer("3"), "RecurrentQuantizer: dim must be an integer of at least 1, got '3'."),
    (lambda: RecurrentQuantizer(3, loss="paper", weights=(1, 1)), "RecurrentQuantizer: weights must be three numbers (hard, soft, joint), got (1, 1)."),
    (lambda: layer()(np.zeros((2, 3), np.float32)), "RecurrentQuantizer: x must be a torch.Tensor, got ndarray."),
    (lambda: layer().encode([1, 2, 3]), "encode: x must be a torch.Tensor or a numpy array, got list."),
    (lambda: layer().encode(X.to_sparse()), "encode: x must be a dense tensor, got torch.sparse_coo."),
    (lambda: layer()(X.to_sparse()), "RecurrentQuantizer: x must be a dense tensor, got torch.sparse_coo."),
    (lambda: layer().encode(X, beam=np.array([1, 2])), "encode: beam must be an integer from 1 to 4096, got array([1, 2])."),
    (lambda: layer().initialise(X, seed=1.5), "initialise: seed must be an integer from 0 to 18446744073709551615, got 1.5."),
    (lambda: layer().revive(X, seed="a"), "revive: seed must be an integer from 0 to 18446744073709551615, got 'a'."),
    (lambda: RecurrentQuantizer(3, loss="paper", weights="123"), "RecurrentQuantizer: weights must be three numbers (hard, soft, joint), got '123'."),
    (lambda: RecurrentQuantizer(3, level_weights="1234"), "RecurrentQuantizer: level_weights must be 4 numbers, got '1234'."),
    (lambda: RecurrentQuantizer(3, offset="no"), "RecurrentQuantizer: offset must be True or False, got 'no'."),
    (lambda: layer().fit("abc"), "fit: every batch of x must be a torch.Tensor or a numpy array, got str."),
    (lambda: layer().fit({"a": X}), "fit: every batch of x must be a torch.Tensor or a numpy array, got str."),
    (lambda: layer().fit([[[1.0, 2.0, 3.0]]]), "fit: every batch of x must be a torch.Tensor or a numpy array, got list."),
    (lambda: layer().usage(X), "usage: codes must be integers, got float32."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), VALUE, ids=[m[:60] for _, m in VALUE])
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        call()


@pytest.mark.parametrize(("call", "message"), TYPE, ids=[m[:60] for _, m in TYPE])
def test_bad_types(call, message):
    with pytest.raises(TypeError, match=re.escape(message) + "$"):
        call()


def test_forward_does_not_look_at_values():
    """NaN goes through the layer as through any other: looking would synchronise a GPU."""
    assert layer()(BAD).loss.isnan()


def test_any_kind_of_number_is_a_gamma():
    assert RecurrentQuantizer(3, gamma=np.float32(2)).gamma == 2
    assert torch.equal(*(F.quantize(X, C, S, gamma=g).soft for g in (2, torch.tensor(2.0))))


def test_read_only_arrays_are_taken_as_they_are_without_touching_the_warnings_of_the_process(monkeypatch):
    values = X.numpy().copy()
    values.flags.writeable = False
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(warnings, "catch_warnings", None)
            patch.setattr(warnings, "filters", [("error", None, Warning, None, 0)])
            tensor = checks.array("op", "x", values[::2, 1:])
    finally:
        torch.set_warn_always(before)
    address = values.ctypes.data
    assert torch.equal(tensor, X[::2, 1:])
    assert tensor.data_ptr() == address + 4
    del values
    gc.collect()
    assert torch.equal(tensor, X[::2, 1:])


@pytest.mark.parametrize("op", ["encode", "decode", "revive", "save"])
def test_uninitialised_layers_say_so(op, tmp_path):
    fresh = RecurrentQuantizer(3, 4, 2)
    argument = {"decode": B, "save": tmp_path / "a"}.get(op, X)
    with pytest.raises(RuntimeError, match=f"{op}: the layer has not seen data yet; call layer.initialise"):
        getattr(fresh, op)(argument)
