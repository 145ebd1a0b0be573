"""The examples run, and do what they promise."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE
from torch import nn

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    smaller = ["--numbers", "600", "--epochs", "8", "2", "4", "--out", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / "digits.py"), *smaller]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    codes = [map(float, line.split()[3:]) for line in lines if line.startswith("code,")]
    sizes, full, without_labels = zip(*codes, strict=True)
    exact = float(next(line.split()[-1] for line in lines if line.startswith("features, exact")))
    assert sizes == (1, 2, 3, 4)
    assert full[0] < full[1] - 0.1  # 600 numbers do not fit into 8 bits
    assert min(full[1:]) > max(exact - 0.1, max(without_labels) + 0.1)
    assert any(line.startswith(f"$ drq-fast report {tmp_path / 'full'} --beside") for line in lines)
    page = Path(lines[-1].removeprefix("open in a browser: "))
    assert page.stat().st_size > 20_000


@pytest.mark.parametrize("name", ["digits", "autoencoder", "text_search"])
def test_a_missing_extra_is_named(name):
    code = f"import runpy, sys; sys.modules['sklearn'] = None; runpy.run_path({str(EXAMPLES / name) + '.py'!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    wanted = rf"^examples/{name}\.py: sklearn[.\w]* is missing; `pip install 'drq_fast\[demo\]'` installs it\.$"
    assert re.match(wanted, result.stderr.strip())


@pytest.mark.slow
def test_the_autoencoder_is_no_worse_than_with_the_layer_it_replaces():
    pytest.importorskip("sklearn")
    pytest.importorskip("vector_quantize_pytorch")
    module = load("autoencoder")
    ours, peer = ([module.run(make, seed, 1000) for seed in range(3)] for make in (module.ours, module.peer))
    assert mean(error for error, _ in ours) <= mean(error for error, _ in peer)
    assert mean(used for _, used in ours) >= mean(used for _, used in peer)


def test_the_autoencoder_learns():
    pytest.importorskip("sklearn")
    module = load("autoencoder")
    untrained, trained = module.run(module.ours, 0, 1), module.run(module.ours, 0, 300)
    assert trained[0] < 0.5 * untrained[0]
    assert trained[1] > 0.9 * module.CODEWORDS


def test_texts_are_found_and_longer_codes_find_more():
    pytest.importorskip("sklearn")
    command = [sys.executable, str(EXAMPLES / "text_search.py"), "the calendar of a month"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    recalls = [int(line.split("%")[0].split()[-1]) for line in text.splitlines() if "of the 10 nearest" in line]
    assert len(recalls) == 3
    assert recalls == sorted(set(recalls))
    assert "calendar.monthcalendar" in text.splitlines()[-1]


@pytest.mark.slow
def test_answers_over_http_are_those_of_one_index():
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--port", str(port)]
    own = os.environ | {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one to the user's home
        "RAY_ADDRESS": "127.0.0.1:1",  # where nothing answers: the example starts a cluster of its own
        "RAY_worker_niceness": "0",  # with Ray's 15, workers starve beside other processes
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PATIENCE),  # by default a slow proxy is killed after 5 seconds
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(PATIENCE),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=own)
    if re.search("node timed out during startup|proxies not available after", done.stderr, re.IGNORECASE):
        pytest.skip("Ray did not start within its own 30 or 60 seconds")
    assert done.returncode == 0, done.stderr
    assert "100 answers, all as of one index" in done.stdout


def test_the_paper_in_twenty_lines(tmp_path):
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    np.savez(tmp_path / "digits.npz", x=digits.data.astype(np.float32), label=digits.target)
    command = [sys.executable, str(EXAMPLES / "paper.py"), "digits.npz", "--train", "50", "--query", "10"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows] == ["8", "16", "24", "32"]
    assert all(float(row[-1]) > 0.7 for row in rows)
    assert (tmp_path / "out/paper/checkpoint.safetensors").exists()


@pytest.fixture(scope="module")
def adapters() -> tuple[ModuleType, dict[str, tuple[Any, torch.Tensor]]]:
    """examples/adapters.py, and its models, trained for a few steps."""
    module = load("adapters")
    torch.manual_seed(0)
    models = module.models()
    for model, x in models.values():
        first, last = module.train(model, x, 150)
        assert last < 0.3 * first
        model.eval()
    return module, models


def test_an_adapter_is_at_most_25_lines():
    classes = re.split(r"^(?=class )", (EXAMPLES / "adapters.py").read_text(), flags=re.MULTILINE)[1:]
    assert len(classes) == 5
    assert all(len(text.partition("\n\n\n")[0].splitlines()) <= 25 for text in classes)


@pytest.mark.parametrize("image", [False, True])
def test_drop_in_for_residual_vq(adapters, image):
    sizes = {"dim": 8, "codebook_size": 16, "num_quantizers": 3, "accept_image_fmap": image}
    layer, x = adapters[0].DropIn(**sizes), torch.randn(4, 8, 5, 6) if image else torch.randn(4, 30, 8)
    made = [layer]
    if importlib.util.find_spec("vector_quantize_pytorch") and not image:  # 1.32 refuses these images
        made.append(importlib.import_module("vector_quantize_pytorch").ResidualVQ(**sizes, shared_codebook=True))
    for each in made:
        quantized, indices, losses = each(x)
        assert quantized.shape == x.shape
        assert indices.shape == ((4, 5, 6, 3) if image else (4, 30, 3))
        assert losses.shape == (3,)
    quantized, indices, losses = layer.eval()(x)
    assert torch.equal(layer.get_output_from_indices(indices), quantized)
    assert losses.sum().item() == pytest.approx(layer.layer(x.movedim(layer.axis, -1)).loss.item(), rel=1e-5)
    if not image:
        mask = torch.arange(30) < torch.tensor([[30], [20], [10], [1]])
        assert bool((layer(x, mask=mask)[1][~mask] == -1).all())


def test_semantic_ids_are_unique(adapters):
    model, x = adapters[1]["RQVAE"]
    x = torch.cat([x, x[:5]])
    ids = model.ids(x)
    assert ids.codes.shape == (517, 3)
    assert len(ids.codes.unique(dim=0)) == 517
    assert torch.equal(ids.codes[:5, 0], ids.codes[-5:, 0])
    assert 0 in ids.find(ids.tokens([0])[0][:2])


def test_image_tokens_have_unit_length(adapters):
    model, x = adapters[1]["ImageQuantizer"]
    z = model.encoder(x)
    quantized, tokens, _ = model.quantizer(z)
    assert quantized.shape == z.shape
    assert tokens.shape == (64, 4, 4, 2)
    torch.testing.assert_close(model.quantizer.decode(tokens), quantized)
    assert model.quantizer.decode(tokens[..., :1]).shape == z.shape


def test_audio_codes_follow_the_bandwidth(adapters):
    model, x = adapters[1]["AudioQuantizer"]
    quantizer, z = model.quantizer, model.encoder(x)
    assert [quantizer.levels(b) for b in (None, 1e6, 1200, 899, 600, 1)] == [4, 4, 4, 2, 2, 1]
    codes = quantizer(z)[1]
    assert codes.shape == (32, 4, 40)
    coarse, prefix, _ = quantizer(z, bandwidth=600)
    assert torch.equal(prefix, codes[:, :2])
    assert torch.equal(quantizer.decode(prefix), coarse)
    errors = [(model.decoder(quantizer.decode(codes[:, :L])) - x).square().mean().item() for L in (1, 2, 3, 4)]
    assert errors == sorted(errors, reverse=True)
    quantizer.train()
    drawn = quantizer(z)[0]
    codes = quantizer.eval()(z)[1]
    prefixes = [quantizer.decode(codes[:, :L]) for L in (1, 2, 3, 4)]
    lengths = [{L for L in range(4) if torch.equal(prefixes[L][n], drawn[n])} for n in range(32)]
    assert all(lengths)
    assert set.union(*lengths) == {0, 1, 2, 3}


class Peer(nn.Module):
    """ResidualVQ with a shared codebook, called as the adapters call RecurrentQuantizer."""

    def __init__(self, dim: int, codewords: int, levels: int) -> None:
        super().__init__()
        library = importlib.import_module("vector_quantize_pytorch")
        self.levels, self.bits = levels, levels * (codewords - 1).bit_length()
        self.rvq = library.ResidualVQ(dim=dim, codebook_size=codewords, num_quantizers=levels, shared_codebook=True)

    def forward(self, x, levels=None, mask=None, reduction="mean"):
        flat = x.reshape(1, -1, x.shape[-1])
        quantized, codes, losses = self.rvq(flat)
        if levels is not None:
            levels = levels if isinstance(levels, torch.Tensor) else torch.tensor(levels).expand(x.shape[:-1])
            prefixes = self.rvq.get_codes_from_indices(codes).cumsum(dim=0)[:, 0]
            chosen = prefixes[levels.flatten() - 1, torch.arange(levels.numel())]
            quantized = flat + (chosen - flat).detach()
        loss = losses * self.levels if reduction == "level" else losses.sum()  # DropIn divides by the levels
        return quantized.view(x.shape), codes.view(*x.shape[:-1], -1), loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DropIn", "RQVAE", "ImageQuantizer", "AudioQuantizer"])
def test_adapters_are_no_worse_than_around_the_peer(name, monkeypatch):
    """Audio is compared over all bandwidths, since dropout trains for all of them."""
    pytest.importorskip("vector_quantize_pytorch")
    module = load("adapters")

    def error(seed: int) -> float:
        torch.manual_seed(seed)
        model, x = module.models()[name]
        module.train(model, x, 1000)
        model.eval()
        with torch.no_grad():
            if name != "AudioQuantizer":
                return (model(x)[0] - x).square().mean().item()
            frames = [model.quantizer(model.encoder(x), bandwidth)[0] for bandwidth in (300, 600, 900, 1200)]
            return mean((model.decoder(each) - x).square().mean().item() for each in frames)

    ours = [error(seed) for seed in range(3)]
    monkeypatch.setattr(module, "RecurrentQuantizer", Peer)
    peer = [error(seed) for seed in range(3)]
    assert mean(ours) <= mean(peer)
