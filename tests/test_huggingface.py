"""Layers and codecs in folders like those of the Hugging Face Hub, and in its cache; nothing is sent or fetched."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drq_fast import Codec, FileError, RecurrentQuantizer

hub = pytest.importorskip("huggingface_hub")
bridge = pytest.importorskip("drq_fast.interop.huggingface")

X = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture
def layer() -> RecurrentQuantizer:
    layer = RecurrentQuantizer(6, 16, 4, codebooks=2, level_weights=(1, 2, 3, 4))
    layer.initialise(X, seed=0)
    return layer


@pytest.fixture
def offline(monkeypatch):
    """Whoever asks the network fails at once."""

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.fixture(params=["layer", "codec"])
def saved(request, layer) -> Codec | RecurrentQuantizer:
    return layer if request.param == "layer" else Codec(*layer.codec().tensors(), codebooks=(1, 3), unit=True)


def assert_same(found, expected) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Codec):
        assert found == expected
        return
    assert found._config() == expected._config()
    assert not found.training
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in expected.state_dict().items())


def test_a_folder_gives_back_what_was_saved(saved, tmp_path, offline):
    assert saved.save_pretrained(tmp_path / "a" / "mine") is None
    assert sorted(path.name for path in (tmp_path / "a/mine").iterdir()) == FILES
    for folder in (tmp_path / "a/mine", str(tmp_path / "a/mine")):
        assert_same(type(saved).from_pretrained(folder, device="cpu"), saved)
    assert_same(type(saved).load(tmp_path / "a/mine/model.safetensors"), saved)
    config = json.loads((tmp_path / "a/mine/config.json").read_text())
    assert (config["library_name"], config["kind"]) == ("drq_fast", type(saved).__name__)
    assert (config["dim"], config["codewords"], config["levels"]) == (6, 16, 4)


def test_the_card_states_what_the_quantizer_is(layer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer.save_pretrained("mine", errors=(0.5, 0.25, 0.125, 0.0612345))
    card = hub.ModelCard.load("mine/README.md")
    assert card.data.library_name == "drq_fast"
    assert "vector-quantization" in card.data.tags
    assert card.data.license is None
    for line in (
        "# mine",
        "| dimensions | 6 |",
        "| bits of a code | 16: 4 levels of 4 bits |",
        "| codewords of a level | 16 |",
        "| codebooks | 2 |",
        "| 4 | 0.5 |",
        "| 16 | 0.06123 |",
    ):
        assert f"\n{line}\n" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    names = {"x": X}
    exec(code, names)
    assert torch.equal(names["codes"], layer.encode(X))


def test_a_card_that_the_author_wrote_stays(layer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer.codec().save_pretrained(".")
    assert f"\n# {tmp_path.name}\n" in Path("README.md").read_text()
    assert "The author did not state them." in Path("README.md").read_text()
    Path("README.md").write_text("# Mine\n")
    layer.codec().save_pretrained(".", errors=[1, 1, 1, 1])
    assert Path("README.md").read_text() == "# Mine\n"


@pytest.fixture
def uploads(monkeypatch, tmp_path) -> dict[str, dict]:
    """What would be sent to the Hub: the arguments of the upload by repository, with copies of the folders."""
    found = {}

    def create(self, repo_id, *, private=None, exist_ok=False):
        assert exist_ok
        return hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload(self, *, repo_id, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / repo_id)
        found[repo_id] = options
        return f"https://huggingface.co/{repo_id}/commit/1"

    monkeypatch.setattr(hub.HfApi, "create_repo", create)
    monkeypatch.setattr(hub.HfApi, "upload_folder", upload)
    return found


def test_what_is_pushed_is_the_folder(saved, tmp_path, uploads, offline):
    address = saved.push_to_hub("somebody/mine", errors=[4, 3, 2, 1], branch="try", commit_message="First")
    assert address.endswith("somebody/mine/commit/1")
    assert uploads["somebody/mine"]["revision"] == "try"
    assert uploads["somebody/mine"]["commit_message"] == "First"
    assert sorted(path.name for path in (tmp_path / "somebody/mine").iterdir()) == FILES
    assert_same(type(saved).from_pretrained(tmp_path / "somebody/mine"), saved)
    card = (tmp_path / "somebody/mine/README.md").read_text()
    assert f'drq_fast.{type(saved).__name__}.from_pretrained("somebody/mine")' in card
    assert "| 16 | 1 |" in card
    folder = tmp_path / "folder"
    assert saved.save_pretrained(folder, push_to_hub=True, repo_id="somebody/other").endswith("somebody/other/commit/1")
    assert (folder / "README.md").read_text() == (tmp_path / "somebody/other/README.md").read_text()


def test_what_was_downloaded_before_is_found_in_the_cache(saved, tmp_path, offline):
    repository = tmp_path / "models--somebody--mine"
    saved.save_pretrained(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    found = type(saved).from_pretrained("somebody/mine", cache_dir=tmp_path, local_files_only=True)
    assert_same(found, saved)


class Autoencoder(nn.Module, hub.PyTorchModelHubMixin):
    """A model of a user, which the mixin itself saves, with our layer inside."""

    def __init__(self, width: int, update: str = "ema") -> None:
        super().__init__()
        self.encoder, self.layer = nn.Linear(6, width), RecurrentQuantizer(width, 8, 2, update=update)

    def forward(self, x):
        return self.layer(self.encoder(x)).quantized


@pytest.mark.parametrize("update", ["ema", "gradient"])
def test_a_model_with_the_layer_inside(tmp_path, update):
    model = Autoencoder(4, update=update)
    model(X)
    model(X)
    model.eval().save_pretrained(tmp_path)
    again = Autoencoder.from_pretrained(tmp_path).eval()  # earlier versions of the mixin leave it in training mode
    assert torch.equal(again(X), model(X))


def test_what_is_refused(layer, tmp_path):
    layer.save_pretrained(tmp_path / "layer")
    with pytest.raises(FileError, match=r"model\.safetensors holds a quantizer, not a codec\.$"):
        Codec.from_pretrained(tmp_path / "layer")
    with pytest.raises(FileNotFoundError, match=r"^load: .*model\.safetensors cannot be read: No such file"):
        Codec.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"^save: the layer has not seen data yet"):
        RecurrentQuantizer(4).save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(TypeError, match=r"^from_pretrained: options must be among revision, .*, got map_location\.$"):
        RecurrentQuantizer.from_pretrained(tmp_path / "layer", map_location="cuda")
    wanted = "save_pretrained: errors must be 4 numbers, one after each level, got"
    with pytest.raises(ValueError, match=f"^{wanted} 2\\.$"):
        layer.save_pretrained(tmp_path, errors=[1, 2])
    with pytest.raises(TypeError, match=f"^{wanted} 'none'\\.$"):
        layer.save_pretrained(tmp_path, errors="none")
    with pytest.raises(TypeError, match=f"^{wanted} 1\\.$".replace("save_pretrained", "push_to_hub")):
        layer.push_to_hub("somebody/mine", errors=1)


def test_without_huggingface_hub_one_sentence_says_what_to_install(monkeypatch, layer):
    monkeypatch.delitem(sys.modules, "drq_fast.interop.huggingface")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = (
        "drq_fast.interop.huggingface: huggingface_hub is missing; `pip install 'drq_fast[huggingface]'` installs it."
    )
    for call in (
        lambda: layer.save_pretrained("x"),
        lambda: Codec.from_pretrained("x"),
        lambda: layer.push_to_hub("x"),
    ):
        with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(message)}$"):
            call()
