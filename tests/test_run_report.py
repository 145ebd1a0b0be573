"""`drq-fast report`: what it writes, for which runs, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from drq_fast.app import cli, page, report
from drq_fast.app.run import Run

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("PIL")

N, CLASSES = 120, 3
NETWORK = ["--hidden", "16", "--dim", "24", "--codewords", "8", "--levels", "3", "--epochs", "2", "1", "1"]
COUNTS = ["--train", "15", "--query", "5"]
LABELLED = {"map.svg", "precision_recall.svg", "precision.svg", "error.svg", "usage.svg", "losses.svg", "tsne.png"}


def command(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


def refused(capsys, *arguments: object, code: int = 1) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a trained run, one without labels beside it, one of another split, a fitted run and pixels."""
    here = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    label = np.arange(N) % CLASSES
    x = (np.eye(CLASSES, 8)[label] + 0.3 * rng.normal(size=(N, 8))).astype(np.float32)
    np.savez(here / "features.npz", x=x, label=label, classes=np.array(["owl", "</script>", "a & b"]))
    np.save(here / "pixels.npy", rng.integers(256, size=(N, 6, 5, 3), dtype=np.uint8))
    np.save(here / "vectors.npy", x)
    data = ["--data", here / "features.npz", *COUNTS, *NETWORK]
    command("train", here / "run", *data)
    command("train", here / "plain", *data, "--ablation", "unsupervised")
    command("train", here / "other", *data, "--seed", 1)
    for name in ("run", "plain", "other"):
        command("evaluate", here / name, *(["--exact"] if name == "run" else []))
    command("fit", here / "fitted", here / "vectors.npy", "--codewords", 8, "--levels", 2, "--rounds", 2)
    command("encode", here / "fitted", here / "vectors.npy")
    command("evaluate", here / "fitted", "--queries", here / "vectors.npy", "-k", 3)
    return here


@pytest.fixture
def runs(made, tmp_path) -> Path:
    """A copy, to write to."""
    for name in ("run", "plain", "other", "fitted"):
        shutil.copytree(made / name, tmp_path / name)
    for name in ("features.npz", "pixels.npy", "vectors.npy"):
        (tmp_path / name).symlink_to(made / name)
    return tmp_path


def data_of(path: Path) -> dict:
    text = path.read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_trained_run_beside_another(runs, capsys):
    command("report", runs / "run", "--beside", runs / "plain", "--images", runs / "pixels.npy", "--points", 40)
    folder = runs / "run" / "report"
    assert {path.name for path in folder.iterdir()} == LABELLED | {"report.md", "report.json", "page.html"}
    assert capsys.readouterr().out.split() == [str(path) for path in sorted(folder.iterdir())]
    facts = json.loads((folder / "report.json").read_text())
    assert [run["name"] for run in facts["runs"]] == ["run", "plain (unsupervised)"]
    assert facts["runs"][0]["metrics"] == json.loads((runs / "run" / "metrics.json").read_text())
    assert facts["items"]["classes"] == ["owl", "</script>", "a & b"]
    text = (folder / "report.md").read_text()
    exact = facts["runs"][0]["metrics"]["exact"]
    for what, key in (("mAP@60", "mAP"), ("Relative squared error", "error")):
        rows = [
            f"| {run['name']} | " + " | ".join(f"{row[key]:.4f}" for row in run["metrics"]["lengths"])
            for run in facts["runs"]
        ]
        head = (
            f"## {what} by code length\n\n| run | 3 bits | 6 bits | 9 bits | exact |\n| --- | --- | --- | --- | --- |"
        )
        assert f"{head}\n{rows[0]} | {exact[key]:.4f} |\n{rows[1]} |  |\n" in text
    for name in LABELLED:
        assert f"]({name})" in text
        assert (folder / name).stat().st_size > 5000
    captions = re.findall(r"^!\[(.*)\]", text, re.MULTILINE)
    assert not set(captions) & set(text.splitlines())  # a figure has its caption in it
    settings = text.partition("## Settings")[2]
    assert "| hidden | 16 | 16 |" in settings
    assert not re.search(r"^\| (root|backbone|size|augment|freeze_norms) \|", settings, re.MULTILINE)
    assert "| ablation | none | unsupervised |" in text


def test_a_trained_run_beside_several(runs):
    others = [runs / name for name in ("second", "third")]
    for other in others:
        shutil.copytree(runs / "plain", other)
    beside = [word for other in (runs / "plain", *others) for word in ("--beside", other)]
    command("report", runs / "run", *beside, "--points", 40)
    folder = runs / "run" / "report"
    facts = json.loads((folder / "report.json").read_text())
    names = ["run", "plain (unsupervised)", "second (unsupervised)", "third (unsupervised)"]
    assert [run["name"] for run in facts["runs"]] == names
    text = (folder / "report.md").read_text()
    assert text.startswith(f"# {' beside '.join(names)}\n")
    assert f"ranked by metric ip (run), {', '.join(f'l2 ({name})' for name in names[1:])}. With 9 bits" in text
    assert re.search(r", mAP@[\d,]+ of run is 0\.\d{4}", text)
    for name in names:
        assert len(re.findall(rf"^\| {re.escape(name)} \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", text, re.MULTILINE)) == 2
    assert [other["run"] for other in data_of(folder / "page.html")["beside"]] == names[1:]
    drawn = (folder / "usage.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in names)


def test_runs_of_the_same_name_have_the_names_of_their_folders(runs):
    for name in ("a", "b"):
        shutil.copytree(runs / "plain", runs / name / "same")
    parts = [report._part(Run(runs / name)) for name in ("run", "a/same", "b/same")]
    found = report._distinct_names(parts, [Run(runs / name) for name in ("run", "a/same", "b/same")])
    assert [part.name for part in found] == ["run", str(runs / "a/same"), str(runs / "b/same")]


def test_names_are_drawn_and_written_as_they_are(runs):
    odd = (runs / "run").rename(runs / r"a$\frac$ {{data}} and so on and so on")
    command("report", odd, "--points", 40)
    text = (odd / "report" / "page.html").read_text()
    assert r"<title>a$\frac$ {{data}} and so on and so on: " in text
    assert data_of(odd / "report" / "page.html")["run"] == odd.name


def test_runs_with_names_that_begin_alike_both_have_losses(made):
    from drq_fast.app import plots

    part = report._part(Run(made / "run"))
    names = [f"a/folder/with/a/long/name/{name}" for name in ("one", "two")]
    figure = plots._losses([part._replace(name=name) for name in names])
    assert [len(axes.get_lines()) - 2 * 2 for axes in figure.axes] == [2, 2, 2]  # and two dotted lines each
    figure = plots._losses([part._replace(history=[]), part])
    assert [len(axes.get_lines()) - 2 for axes in figure.axes] == [1, 1, 1]


def test_usage_is_counted_by_level(made):
    part = report._part(Run(made / "run"))
    codes = torch.zeros(8, 3, dtype=torch.uint8)
    codes[:, 1] = torch.arange(8)
    codes[4:, 2] = 3
    one, all_alike, two = part._replace(codes=codes).usage()
    assert (one["used"], one["entropy"], one["perplexity"]) == (1, 0.0, 1.0)
    assert (all_alike["used"], all_alike["entropy"], all_alike["perplexity"]) == (8, 3.0, 8.0)
    assert (two["used"], two["entropy"], two["counts"]) == (2, 1.0, [4, 4, 0, 0, 0, 0, 0, 0])


def test_a_fitted_run_has_figures_and_no_page(runs, capsys):
    command("report", runs / "fitted")
    names = {path.name for path in (runs / "fitted" / "report").iterdir()}
    assert names == {"recall.svg", "error.svg", "usage.svg", "report.md", "report.json"}
    assert "a fitted run has no labels, so there is no page.html" in capsys.readouterr().err
    text = (runs / "fitted" / "report" / "report.md").read_text()
    assert "| bits | bytes | recall@3 | relative squared error |" in text
    assert "no page" in text


def test_the_same_runs_give_the_same_files(runs):
    folder = runs / "run" / "report"
    contents = []
    for _ in range(2):
        command("report", runs / "run", "--points", 40, "--force")
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]


def test_an_existing_report_is_replaced_only_with_force(runs, capsys):
    old = runs / "run" / "report"
    command("report", runs / "run", "--points", 40)
    message = refused(capsys, "report", runs / "run", "--points", 0)
    assert message.endswith("report exists already; --force replaces it.")
    assert (old / "tsne.png").exists()
    command("report", runs / "run", "--points", 0, "--force")
    assert not (old / "tsne.png").exists()


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_files_of_the_user_in_a_report_are_kept(runs, capsys, force):
    command("report", runs / "fitted")
    mine = runs / "fitted" / "report" / "mine.txt"
    mine.write_text("kept")
    message = refused(capsys, "report", runs / "fitted", *force)
    assert message.endswith("report/mine.txt is not a result of this run; move it to another folder.")
    command("encode", runs / "fitted", runs / "vectors.npy", "--force")
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


def test_a_report_folder_that_is_a_link_is_left_alone(runs, capsys):
    command("report", runs / "fitted")
    report = runs / "fitted" / "report"
    report.rename(runs / "elsewhere")
    report.symlink_to(runs / "elsewhere")
    before = sorted((runs / "elsewhere").iterdir())
    assert "report is not a result of this run" in refused(capsys, "report", runs / "fitted", "--force")
    command("encode", runs / "fitted", runs / "vectors.npy", "--force")
    assert sorted((runs / "elsewhere").iterdir()) == before


def test_text_of_the_user_is_escaped_in_the_tables(runs):
    odd = (runs / "fitted").rename(runs / "a\nb <img src=x onerror=alert(1)> [c](d) | `e` *f*")
    command("report", odd)
    lines = (odd / "report" / "report.md").read_text().splitlines()
    shown = r"a b &lt;img src=x onerror=alert(1)&gt; \[c\](d) \| \`e\` \*f\*"
    assert lines[0] == f"# {shown}"
    assert f"| setting | {shown} |" in lines
    assert not any("<img" in line for line in lines)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_report_leaves_what_was_there(runs, monkeypatch, error):
    command("report", runs / "run", "--points", 0)
    before = {path.name: path.read_bytes() for path in (runs / "run" / "report").iterdir()}
    files = {path.name for path in (runs / "run").iterdir()}

    def stop(*_: object) -> str:
        raise error

    monkeypatch.setattr(page, "build", stop)
    with pytest.raises(error):
        report.write(Run(runs / "run"), points=0, force=True)
    assert {path.name: path.read_bytes() for path in (runs / "run" / "report").iterdir()} == before
    assert {path.name for path in (runs / "run").iterdir()} == files


def test_what_a_killed_report_left_is_cleared_away(runs):
    remains = runs / "run" / ".drq_fast-0123456789abcdef.tmp"
    (remains / "report").mkdir(parents=True)
    (remains / "report" / "half").write_text("")
    command("report", runs / "run", "--points", 0)
    assert not remains.exists()
    assert not (runs / "run" / "report" / "half").exists()


def test_only_runs_with_the_same_split_stand_beside_each_other(runs, capsys):
    message = refused(capsys, "report", runs / "run", "--beside", runs / "other", code=2)
    expected = (
        f"--beside must be a run on the same data with the same split, got {runs / 'other'}, whose seed is 1 and not 0"
    )
    assert message == f"drq-fast report: {expected}."
    message = refused(capsys, "report", runs / "run", "--beside", runs / "fitted", code=2)
    assert message.endswith("whose command is fit and not train.")
    message = refused(capsys, "report", runs / "run", "--beside", runs / "plain", "--beside", runs / "plain", code=2)
    assert message.endswith(f"--beside must be runs that are not in the report already, got {runs / 'plain'}.")
    assert not (runs / "run" / "report").exists()


def test_counts_that_are_the_protocols_own_are_the_same_split(made):
    part = report._part(Run(made / "run"))
    config = part.config | {"train": None, "query": 100}
    given, default = (
        report._split(part._replace(config=config | {"train": train, "query": query}))
        for train, query in ((500, 100), (None, None))
    )
    assert given == default


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((N - 1, 4, 4), np.uint8), "uint8 [119, 4, 4]"),
        (np.zeros((N, 4, 4), np.float32), "float32 [120, 4, 4]"),
        (np.zeros((N, 3, 4, 4), np.uint8), "uint8 [120, 3, 4, 4]"),
        (np.zeros((N, 16), np.uint8), "uint8 [120, 16]"),
    ],
)
def test_pixels_of_the_wrong_shape(runs, capsys, array, got):
    np.save(runs / "wrong.npy", array)
    message = refused(capsys, "report", runs / "run", "--images", runs / "wrong.npy", code=2)
    expected = "--images must be uint8 [120, H, W] or [120, H, W, 3], a picture per item, got"
    assert message == f"drq-fast report: {expected} {got}."


def test_other_refusals(runs, capsys):
    assert "nowhere.npy cannot be read" in refused(capsys, "report", runs / "run", "--images", runs / "nowhere.npy")
    (runs / "text.npy").write_text("text")
    assert "is not a complete .npy file" in refused(capsys, "report", runs / "run", "--images", runs / "text.npy")
    message = refused(capsys, "report", runs / "fitted", "--images", runs / "pixels.npy", code=2)
    assert "images must be left out for a fitted run" in message
    (runs / "plain" / "queries.npy").unlink()
    assert "queries.npy does not exist; `drq-fast evaluate" in refused(capsys, "report", runs / "plain", "--points", 0)
    (runs / "run" / "metrics.json").unlink()
    message = refused(capsys, "report", runs / "run")
    assert message.endswith(f"metrics.json does not exist; `drq-fast evaluate {runs / 'run'}` makes it.")


def test_figures_of_other_codes_are_refused(runs, capsys):
    path = runs / "run" / "metrics.json"
    metrics = json.loads(path.read_text())
    path.write_text(json.dumps(metrics | {"database": 7}))
    assert "evaluate again with --force" in refused(capsys, "report", runs / "run")


def test_a_missing_package_is_named_with_the_command_that_installs_it(runs, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sklearn" else find(name, *a))
    expected = "scikit-learn is not installed; `pip install 'drq_fast[report]'` installs what figures need."
    assert refused(capsys, "report", runs / "run") == f"drq-fast report: {expected}"


def test_images_of_a_folder_are_on_the_page(tmp_path, capsys):
    from PIL import Image

    for c, name in enumerate(("left", "right")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for n in range(12):
            Image.new("RGB", (20, 16), (200 * c, 10 * n, 0)).save(tmp_path / "images" / name / f"{n:02}.png")
    data = ["--data", tmp_path / "images", "--train", 4, "--query", 2, "--codewords", 4, "--levels", 2]
    command("train", tmp_path / "run", *data, "--size", 32, "--ablation", "unsupervised", "--no-amp")
    command("evaluate", tmp_path / "run")
    command("report", tmp_path / "run", "--points", 10, "--queries", 3)
    data = data_of(tmp_path / "run" / "report" / "page.html")
    assert len(data["queries"]) == 3
    assert len(data["images"]) == len(set(data["images"])) == 3 + 12
    settings = (tmp_path / "run" / "report" / "report.md").read_text().partition("## Settings")[2]
    assert "| size | 32 |" in settings
    assert not re.search(r"^\| (labels|hidden|dropout) \|", settings, re.MULTILINE)
    message = refused(capsys, "report", tmp_path / "run", "--images", tmp_path / "run" / "codes.npy", "--force", code=2)
    assert "images must be left out for a run on images" in message


def test_the_most_common_classes_have_colours_and_all_items_a_place():
    from drq_fast.app import plots

    labels = np.zeros((60, 25), bool)
    labels[np.arange(50), np.arange(50) % 25] = True
    labels[50:, 24] = True
    labels[50:, 3] = True
    names, colours, kind = plots._kinds(labels, [f"c{n}" for n in range(25)])
    assert names == [*(f"c{n}" for n in range(19)), "c24", "others"]
    assert len(colours) == len(set(map(str, colours))) == 21
    assert [names[k] for k in kind[[0, 24, 20, 55]]] == ["c0", "c24", "others", "c3"]
    x = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    assert plots.embed(x).shape == (3, 2)


def test_items_of_one_code_lie_around_it():
    from drq_fast.app import plots

    place = np.array([[0.0, 0.0], [100.0, 50.0]])
    copy = np.array([1, 0, 1, 1, 0])
    items = plots.spread(place, copy)
    assert len(np.unique(items.round(6), axis=0)) == 5
    np.testing.assert_allclose(items, place[copy], atol=1)
    np.testing.assert_array_equal(items[:2], place[[1, 0]])


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("metrics.json", "lengths", 3, "was not made from the codes"),
        ("metrics.json", "lengths", [{}] * 3, "does not describe the metrics of a run ('bits')"),
        ("metrics.json", "lengths", [1, 2, 3], "does not describe the metrics of a run ("),
        ("metrics.json", "R", None, "metrics: all figures must be numbers, got None"),
        ("metrics.json", "depths", [], "metrics: precision must be given at every depth, got 0 depths"),
        ("metrics.json", "metric", "x", "metrics: metric must be "),
        ("metrics.json", "queries", "x", "metrics: all figures must be numbers, got 'x'"),
        ("history.json", "epochs", [{}], "does not describe the losses of a training ('levels')"),
        ("history.json", "epochs", 1, "does not describe the losses of a training ("),
        ("config.json", "protocol", [], "does not name a protocol"),
    ],
)
def test_files_of_other_contents_are_refused(runs, capsys, name, key, value, message):
    path = runs / "run" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert message in refused(capsys, "report", runs / "run", "--points", 0)
