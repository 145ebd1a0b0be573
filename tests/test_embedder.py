"""A trained network that embeds new images, and `drq-fast search` with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from drq_fast import Index
from drq_fast.app import cli
from drq_fast.app.images import ImageQueries
from drq_fast.app.run import Run
from drq_fast.files import FileError
from drq_fast.retrieval.embedder import Embedder, image_paths

pytest.importorskip("efficientnet_lite_pytorch", reason="the extra [retrieval] is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra [retrieval] is not installed")

NETWORK = ["--size", "32", "--dim", "24", "--codewords", "4", "--levels", "2", "--epochs", "1", "1", "1"]
COUNTS = ["--train", "4", "--query", "2"]


def command(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1) -> str:
    """The only line that a refused command prints."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with images of two classes, a run that was trained on them, and one without labels."""
    here, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for c, name in enumerate(("dark", "light")):
        (here / "images" / name).mkdir(parents=True)
        for n in range(12):
            pixels = rng.integers(100 * c, 100 * c + 100, size=(50, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(here / "images" / name / f"{n:02}.png")
    for name, options in (("run", ()), ("plain", ("--ablation", "unsupervised", "--no-amp"))):
        command("train", here / name, "--data", here / "images", *COUNTS, *NETWORK, *options)
        command("evaluate", here / name)
        command("index", here / name)
    return here


@pytest.fixture
def here(made, tmp_path) -> Path:
    """A copy, which is at another place than the training was; the images stay behind."""
    for name in ("run", "plain"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def query_files(made: Path) -> list[Path]:
    """The queries of the run's protocol."""
    experiment = Run(made / "run").experiment()
    return [experiment.items.paths[row] for row in experiment.split.query.tolist()]


@pytest.mark.parametrize("name", ["run", "plain"])
def test_images_are_embedded_as_by_evaluate(made, here, name):
    embedder = Embedder.load(here / name)
    x = embedder.embed(query_files(made))
    assert torch.equal(x, torch.from_numpy(np.load(made / name / "queries.npy")))
    assert embedder.side == 64


def test_runs_that_share_stage_one_and_another_size_for_tests(made, tmp_path):
    data = ["--data", made / "images", *COUNTS, *NETWORK, "--no-amp"]
    for name, options in (("4", ()), ("8", ("--codewords", "8")), ("64", ("--test-size", "64", "--average", "0.9"))):
        one = tmp_path / ("other" if name == "64" else "one")
        command("train", tmp_path / name, *data, *options, "--stage-one", one)
        command("evaluate", tmp_path / name, "--exact")
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["stage_one"] == str(one)
        x = Embedder.load(tmp_path / name).embed(query_files(made))
        torch.testing.assert_close(x, torch.from_numpy(np.load(tmp_path / name / "queries.npy")))
    larger, x = Embedder.load(tmp_path / "64"), torch.from_numpy(np.load(tmp_path / "64" / "queries.npy"))
    assert larger.model.backbone.pixels.size == 32
    larger.size = 32
    assert not torch.allclose(larger.embed(query_files(made)), x)


def test_kinds_of_images(made, here):
    embedder, files = Embedder.load(here / "run"), query_files(made)[:2]
    x = embedder.embed(files)
    opened = [Image.open(file) for file in files]
    torch.testing.assert_close(embedder.embed(opened), x)
    torch.testing.assert_close(embedder.embed(np.stack([np.asarray(image) for image in opened])), x)
    torch.testing.assert_close(embedder.embed(str(files[0])), x[:1])
    torch.testing.assert_close(embedder.embed(opened[1]), x[1:])
    torch.testing.assert_close(embedder.embed(np.asarray(opened[1])), x[1:])
    assert embedder.embed([made / "images", files[0]]).shape == (25, 24)
    assert image_paths(made / "images" / "dark") == sorted((made / "images" / "dark").iterdir())
    with pytest.raises(ValueError, match=r"^embed: an image must be a file, .*, got float32 \[50, 70\]\.$"):
        embedder.embed([np.zeros((50, 70), np.float32)])
    with pytest.raises(ValueError, match=r"^embed: images must be at least one, got none\.$"):
        embedder.embed([])


def test_search_by_an_image_names_files(made, capsys):
    files = query_files(made)
    x = Embedder.load(made / "run").embed(files[:1])
    scores, ids = Index.load(made / "run" / "index.drq").search(x, 3, levels=1)
    capsys.readouterr()
    command("search", made / "run", files[0], "-k", 3, "--bits", 2, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == [str(files[0])]
    assert found["ids"] == ids.tolist()
    assert found["scores"] == [pytest.approx(scores[0].tolist())]
    names = found["found"][0]
    assert len(set(names)) == 3
    assert all(Path(name).is_file() for name in names)
    assert not {str(file) for file in files} & set(names)  # queries are not in the database
    command("search", made / "run", made / "images" / "light", "-k", 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [str(p) for p in image_paths(made / "images" / "light")]
    assert all(line.split("\t")[1].startswith(str(made / "images")) for line in lines)


def test_the_names_are_those_of_the_codes(made):
    run = Run(made / "run")
    names = ImageQueries(run, made / "images")._known(Index.load(run.index))
    codes = run.quantizer().encode(Embedder.load(run.folder).embed(list(names.values())))
    assert torch.equal(codes, run.load_codes()[0])


def test_names_follow_ids_when_images_are_removed_and_added(here, made, capsys):
    """An index whose ids are not the rows of the codes has no names."""
    run, photo = Run(here / "run"), query_files(made)[0]
    names = ImageQueries(run, photo)._known(Index.load(run.index))
    first = list(names)[: len(names) // 3]  # all later rows move
    np.save(here / "gone.npy", np.array(first))
    command("remove", here / "run", here / "gone.npy")
    np.save(here / "new.npy", Embedder.load(run.folder).embed(photo).numpy())
    command("add", here / "run", here / "new.npy")
    capsys.readouterr()
    command("search", here / "run", photo, "-k", len(names), "--json")
    found, left = json.loads(capsys.readouterr().out), len(names) - len(first) + 1
    for i, name in zip(found["ids"][0][:left], found["found"][0][:left], strict=True):
        assert name == (str(i) if i == len(names) else names[i])
    assert set(found["found"][0][left:]) <= {"none"}
    np.save(here / "ids.npy", np.arange(len(names)) + len(names))
    command("index", here / "run", "--ids", here / "ids.npy", "--force")
    capsys.readouterr()
    command("search", here / "run", photo, "-k", 2)
    assert "note: results are ids, not names of files: the index has ids of its own.\n" in capsys.readouterr().err


def test_without_the_training_images_results_are_ids(here, made, capsys):
    config = json.loads((here / "run" / "config.json").read_text())
    (here / "run" / "config.json").write_text(json.dumps(config | {"data": [str(here / "gone")]}))
    photo = query_files(made)[0]
    capsys.readouterr()
    command("search", here / "run", photo, "-k", 2)
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{photo}\t")
    assert [pair.split(":")[0].isdigit() for pair in captured.out.split()[1:]] == [True, True]
    assert f"note: results are ids, not names of files: {here / 'gone'}, on which " in captured.err
    del config["side"]  # as in a run of 0.1.0
    assert torch.equal(loaded_with(here, config).embed(photo), Embedder.load(made / "run").embed(photo))
    with pytest.raises(FileNotFoundError, match=r"^load: .*gone does not exist, and .* does not have its `side`\.$"):
        loaded_with(here, config | {"data": [str(here / "gone")]})


def loaded_with(here: Path, config: dict) -> Embedder:
    (here / "run" / "config.json").write_text(json.dumps(config))
    return Embedder.load(here / "run")


def test_cifar_is_read_at_its_own_size(made, here):
    config = json.loads((here / "run" / "config.json").read_text())
    assert loaded_with(here, config | {"side": 32}).side == 32
    (here / "cifar").mkdir()
    (here / "cifar" / "data_batch_1.bin").touch()
    del config["side"]
    assert loaded_with(here, config | {"data": [str(here / "cifar")]}).side == 32


def test_unreadable_images_are_named(here, capsys):
    (here / "text.png").write_text("not an image")
    line = refused(capsys, "search", here / "run", here / "text.png")
    assert line.startswith(f"drq-fast search: the image {here / 'text.png'} cannot be decoded (")
    line = refused(capsys, "search", here / "run", here / "none.jpg")
    assert line == f"drq-fast search: the image {here / 'none.jpg'} is missing."
    (here / "empty").mkdir()
    line = refused(capsys, "search", here / "run", here / "empty")
    assert line == f"drq-fast search: {here / 'empty'} must be a folder of images, got a folder without any."


def test_filters_and_index_files(here, made, capsys):
    np.save(here / "keep.npy", np.array([3]))
    capsys.readouterr()
    command("search", made / "run", query_files(made)[0], "-k", 2, "--keep", here / "keep.npy", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["ids"] == [[3]]
    assert len(found["found"][0]) == 1
    line = refused(capsys, "search", here / "run" / "index.drq", query_files(made)[0], code=2)
    expected = f"vectors in a .npy file, because {here / 'run' / 'index.drq'} has no network to embed images"
    assert line == f"drq-fast search: queries must be {expected}, got {query_files(made)[0]}."


def test_runs_without_a_network_for_images_are_refused(here, made, capsys):
    rng, photo = np.random.default_rng(0), query_files(made)[0]
    np.savez(here / "f.npz", x=rng.normal(size=(60, 8)).astype(np.float32), label=np.arange(60) % 2)
    network = ["--hidden", 8, "--dim", 12, "--codewords", 4, "--levels", 2, "--epochs", 1, 1, 1]
    command("train", here / "features", "--data", here / "f.npz", "--train", 9, "--query", 3, *network)
    line = refused(capsys, "search", here / "features", photo)
    assert line == f"drq-fast search: {here / 'features'} was trained on features, so it has no network for images."
    np.save(here / "x.npy", rng.normal(size=(60, 8)).astype(np.float32))
    command("fit", here / "fitted", here / "x.npy", "--codewords", 4, "--levels", 2, "--rounds", 1)
    line = refused(capsys, "search", here / "fitted", photo)
    assert line == f"drq-fast search: {here / 'fitted'} was fitted to vectors, so it has no network for images."


def test_damaged_runs_are_refused(here):
    run = here / "run"
    shutil.copy(here / "plain" / "config.json", here / "other.json")
    with pytest.raises(
        FileNotFoundError, match=r"^load: .*nowhere/config\.json does not exist; `drq-fast train` makes it"
    ):
        Embedder.load(here / "nowhere")
    config = json.loads((run / "config.json").read_text())
    with pytest.raises(
        FileError, match=r"checkpoint\.safetensors has 'head\.fc8\.weight' of shape \[22, 1280\] instead"
    ):
        loaded_with(here, config | {"dim": 30})
    with pytest.raises(FileError, match=r"config\.json does not describe a training \(.*side must be"):
        loaded_with(here, config | {"side": 0})
    (run / "config.json").write_text(json.dumps(config))
    shutil.copy(here / "plain" / "model.drq", run / "model.drq")
    with pytest.raises(FileError, match="belongs to another training than the model"):
        Embedder.load(run)
    (run / "checkpoint.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="so the network is lost; train again"):
        Embedder.load(run)
