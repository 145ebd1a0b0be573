"""page.html: what is on it, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drq_fast import Index
from drq_fast.app import cli, page
from drq_fast.app.run import Run

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
Image = pytest.importorskip("PIL.Image")

N, CLASSES = 400, 5
NETWORK = ["--hidden", "32", "--dim", "32", "--codewords", "16", "--levels", "3", "--epochs", "1", "1", "1"]


def make(folder: Path, label: np.ndarray, classes: list[str], *options: object) -> Path:
    """The page of a run whose codes are so short that some results are wrong."""
    rng = np.random.default_rng(0)
    flags = label if label.ndim == 2 else np.eye(CLASSES)[label]
    x = (flags @ rng.normal(size=(flags.shape[1], 12)) + 1.2 * rng.normal(size=(N, 12))).astype(np.float32)
    np.savez(folder / "features.npz", x=x, label=label, classes=np.array(classes))
    shades = (40 * np.arange(N)[:, None, None] + np.arange(36).reshape(6, 6)) % 256
    np.save(folder / "pixels.npy", shades.astype(np.uint8))
    for command in (
        ["train", folder / "run", "--data", folder / "features.npz", "--train", 20, "--query", 6, *NETWORK],
        ["evaluate", folder / "run", "--exact"],
        ["report", folder / "run", "--points", 0, *options],
    ):
        assert cli.main([str(word) for word in command]) == 0
    return folder / "run" / "report" / "page.html"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    label = np.random.default_rng(1).integers(CLASSES, size=N)
    names = ["owl", "</script><b>", "a & b", "a long name of a class", "fox"]
    return make(folder, label, names, "--images", folder / "pixels.npy")


@pytest.fixture(scope="module")
def several_labels(tmp_path_factory) -> Path:
    """Without pixels; some items have two labels."""
    flags = np.random.default_rng(1).random((N, CLASSES)) < 0.3
    flags[np.arange(N), np.arange(N) % CLASSES] = True
    return make(tmp_path_factory.mktemp("labels"), flags, ["sky", "sea", "sand", "snow", "sun"], "--queries", 5)


def data_of(path: Path) -> dict[str, Any]:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_the_ranking_is_what_an_index_gives(made):
    run, data = Run(made.parents[1]), data_of(made)
    experiment = run.experiment()
    asked = page.choose(experiment.items.labels[experiment.split.query], 12)
    index = Index(run.quantizer(), "ip")
    codes = run.load_codes()[0]
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))
    index.add_codes(codes[order], order)
    query = torch.from_numpy(np.load(run.queries))[asked]
    pixels = np.load(made.parents[2] / "pixels.npy")
    uris = page.thumbnails(pixels)
    for L, row in enumerate(data["lengths"], 1):
        ids = index.search(query, page.SHOWN, L).ids
        for n, found in enumerate(data["queries"]):
            rows = experiment.split.database[ids[n]].tolist()
            assert [data["images"][item] for item in found["found"][L - 1]] == [uris[r] for r in rows]
        assert row == {name: json.loads(run.metrics.read_text())["lengths"][L - 1][name] for name in row}
    assert [row["bits"] for row in data["lengths"]] == [4, 8, 12]
    assert data["bytes"] == 4 * 32


def test_every_image_is_embedded_once_and_nothing_comes_from_elsewhere(made):
    text, data = made.read_text(), data_of(made)
    used = {item for q in data["queries"] for item in (q["item"], *(i for found in q["found"] for i in found))}
    assert used == set(range(len(data["images"])))
    assert text.count("data:image/webp") == len(data["images"])
    assert text.count("</script>") == 2  # not that of the class's name
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", text)
    assert "<title>run: " in text


def test_labels_are_those_of_the_items(several_labels):
    run, data = Run(several_labels.parents[1]), data_of(several_labels)
    assert data["images"] is None
    experiment = run.experiment()
    asked = page.choose(experiment.items.labels[experiment.split.query], 5)
    for row, q in zip(experiment.split.query[asked].tolist(), data["queries"], strict=True):
        assert data["labels"][q["item"]] == experiment.items.labels[row].nonzero().squeeze(1).tolist()
    assert max(map(len, data["labels"])) > 1


def test_queries_are_spread_over_classes():
    labels = torch.nn.functional.one_hot(torch.arange(30) // 10, 3).bool()
    assert page.choose(labels, 7) == [0, 10, 20, 1, 11, 21, 2]
    assert page.choose(labels, 2) == [0, 20]
    assert sorted(page.choose(labels, 99)) == list(range(30))
    unlabelled = torch.zeros(3, 2, dtype=torch.bool)
    assert page.choose(unlabelled, 2) == [0, 1]


def test_thumbnails_are_small_and_not_enlarged(monkeypatch):
    rng = np.random.default_rng(0)
    sizes = lambda uris: [Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size for uri in uris]  # noqa: E731
    assert sizes(page.thumbnails([np.zeros((8, 6), np.uint8), np.zeros((300, 200, 3), np.uint8)])) == [
        (6, 8),
        (85, 128),
    ]
    noise = list(rng.integers(256, size=(10, 128, 128, 3), dtype=np.uint8))
    large = page.thumbnails(noise)
    monkeypatch.setattr(page, "_BUDGET", sum(map(len, large)) // 2)
    small = page.thumbnails(noise)
    assert sum(map(len, small)) <= page._BUDGET
    assert sizes(small)[0] in ((96, 96), (64, 64), (48, 48))


# Chromium reads from 3 and writes to 4; numbers above 9 cannot be in the way of these.
SHIM = """
import os, sys
os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab."""

    def __init__(self, folder: Path) -> None:
        theirs, self.out = _pipe()
        self.inp, other = _pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command = [sys.executable, "-c", SHIM, str(theirs), str(other), chromium(), *flags]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, pass_fds=(theirs, other), stderr=log)
        os.close(theirs)
        os.close(other)
        self.last, self.buffer, self.session = 0, b"", None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                part = os.read(self.inp, 1 << 16)
                assert part, "Chromium has gone"
                self.buffer += part
            text, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def window(self, width: int, height: int = 800) -> None:
        options = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **options)

    def prefer(self, **features: str) -> None:
        """prefer(color_scheme="dark")"""
        pairs = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def picture(self, path: Path, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.inp)
        os.close(self.out)


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def ranking(browser: Browser) -> list[int]:
    return browser.run("[...document.querySelectorAll('#results li')].map(tile => Number(tile.dataset.item))")


def text(browser: Browser, selector: str) -> str:
    return browser.run(f"document.querySelector({selector!r}).textContent")


def set_length(browser: Browser, n: int) -> None:
    """Moves the slider as a drag does."""
    browser.run(f"by('length').value = {n}; by('length').dispatchEvent(new Event('input', {{bubbles: true}}))")


@pytest.mark.slow
def test_the_slider_changes_ranking_and_figures(browser, made):
    data = data_of(made)
    browser.window(1200)
    browser.open(made)
    n = browser.run("state.query")
    assert (n, text(browser, "#bits")) == (0, "4 bits")
    for length in (2, 0, 1):
        set_length(browser, length)
        row, found = data["lengths"][length], data["queries"][n]["found"][length]
        assert ranking(browser) == found
        assert text(browser, "#bits") == f"{row['bits']} bits"
        assert text(browser, "#size") == f"{row['bytes']} byte{'s' * (row['bytes'] > 1)} instead of 128"
        assert text(browser, "#map") == text(browser, "#here") == f"{row['mAP']:.3f}"
        labels, own = data["labels"], data["queries"][n]["item"]
        right = [bool(set(labels[own]) & set(labels[item])) for item in found]
        assert text(browser, "#precision").split()[0] == str(sum(right))
        counts = browser.run("[...document.querySelectorAll('#rights .now')].map(cell => cell.textContent)")
        assert counts == [f"{row['bits']} bits", str(sum(right))]
        signs = browser.run("[...document.querySelectorAll('#results .sign')].map(sign => sign.textContent)")
        assert signs == ["✓" if one else "✗" for one in right]
    assert data["queries"][n]["found"][0] != data["queries"][n]["found"][2]
    before, now = (set(data["queries"][n]["found"][length]) for length in (0, 1))
    marked = browser.run("[...document.querySelectorAll('#results .new')].map(tile => Number(tile.dataset.item))")
    assert set(marked) == now - before
    assert f"{len(marked)} new" in text(browser, "#status")
    assert browser.run("[...document.images].every(image => image.complete && image.naturalWidth > 0)")


@pytest.mark.slow
def test_the_keyboard_is_enough(browser, made):
    browser.open(made)
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "length"
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    ring = "getComputedStyle(document.activeElement).outline"
    assert "3px" in browser.run(ring)
    gap = "by('ticks').getBoundingClientRect().top - by('length').getBoundingClientRect().bottom"
    assert browser.run(gap) > 3  # the ring covers no number
    shortest = ranking(browser)
    browser.press("ArrowRight")
    assert text(browser, "#bits") == "8 bits"
    assert browser.run("by('length').getAttribute('aria-valuetext')") == "8 bits"
    assert ranking(browser) != shortest
    browser.press("Tab")
    n = browser.run("Number(document.activeElement.value)")
    assert n == browser.run("state.query")
    browser.press("ArrowRight")
    other = (n + 1) % len(data_of(made)["queries"])
    assert browser.run("state.query") == other
    assert ranking(browser) == data_of(made)["queries"][other]["found"][1]


@pytest.mark.slow
def test_a_click_chooses_a_query(browser, made):
    browser.window(1200)
    browser.open(made)
    browser.run("window.scrollTo(0, 0)")
    x, y = browser.run("(r => [r.left + r.width / 2, r.top + r.height / 2])"
                       "(document.querySelectorAll('.queries label')[4].getBoundingClientRect())")  # fmt: skip
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert browser.run("state.query") == 4


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 360, 700, 1200])
@pytest.mark.parametrize("which", ["made", "several_labels"])
def test_nothing_is_wider_than_the_window(browser, request, which, width):
    browser.window(width)
    browser.open(request.getfixturevalue(which))
    assert browser.run("document.documentElement.scrollWidth") == width
    edges = browser.run("[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().right)")
    assert max(edges) <= width


@pytest.mark.slow
def test_several_labels_and_no_pixels(browser, several_labels):
    data = data_of(several_labels)
    browser.window(1200)
    browser.open(several_labels)
    q = data["queries"][browser.run("state.query")]
    right = [bool(set(data["labels"][q["item"]]) & set(data["labels"][i])) for i in q["found"][0]]
    assert browser.run("[...document.querySelectorAll('#results li')].map(e => e.className === 'right')") == right
    names = ", ".join(data["classes"][c] for c in data["labels"][q["found"][0][0]])
    assert text(browser, "#results .picture") == names


@pytest.mark.slow
def test_motion_and_colours_are_as_the_reader_prefers(browser, made):
    browser.window(1200)
    moving = "document.getAnimations().filter(a => !a.transitionProperty).length"
    for motion in ("no-preference", "reduce"):
        browser.prefer(reduced_motion=motion, color_scheme="dark")
        browser.open(made)
        set_length(browser, 0)
        assert (browser.run(moving) > 0) == (motion == "no-preference")
    dark = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.prefer(color_scheme="light")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != dark
