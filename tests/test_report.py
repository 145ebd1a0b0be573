"""Published tables and plots are what the committed figures give; the report of a run; gpu-check."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
PEER = {"ratio": 2.0, "interval": [1.9, 2.1], "wide": False, "rate": 500.0, "peak_mib": 3.0}
ORIGIN = {
    "processor": "A processor",
    "instructions": ["avx2"],
    "torch_threads": 2,
    "gpu": None,
    "versions": {"drq_fast": "0", "faiss-cpu": None},
    "commit": "0123456789abcdef",
    "dirty": True,
    "date": "2020-01-02T03:04:05",
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """module(name): a file of benchmarks/, which import each other by their plain names."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("figures", "plots", "bounds", "report", "provenance", "gpu_check")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def figure(**changes: Any) -> dict[str, Any]:
    sizes = {"N": 2048, "D": 1024, "M": 4, "K": 256}
    figure = {"group": "quantize", "sizes": sizes, "unit": "vectors", "quick": True, "peers": {"a peer": PEER}}
    figure |= {"device": "cpu"}
    return figure | {"ours": {"rate": 1000.0, "peak_mib": 1.5}} | changes


def folder_of(folder: Path, figures: dict[str, dict[str, Any]]) -> Path:
    (folder / "some.json").write_text(json.dumps({"provenance": ORIGIN, "figures": figures}))
    return folder


def content(file: Path) -> str:
    """Without identifiers that Matplotlib derives from last bits of coordinates, which depend on the processor."""
    return re.sub(r"\b[pm][0-9a-f]{10}\b", "identifier", file.read_text())


def test_published_pages_and_plots_are_those_of_the_committed_figures(module: Any, tmp_path: Path) -> None:
    pages = ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
    plots = [f"docs/plots/{plot.name}" for plot in (ROOT / "docs/plots").glob("*")]
    (tmp_path / "docs").mkdir()
    for page in pages:
        shutil.copy(ROOT / page, tmp_path / page)
    module("report").publish(ROOT / "benchmarks/results", tmp_path)
    module("bench_tradeoff").publish(ROOT / "benchmarks/tradeoff.json", tmp_path)
    module("choosing").publish(ROOT / "benchmarks/choosing.json", tmp_path)
    assert "docs/plots/recall.svg" in plots
    assert "docs/plots/training.svg" in plots
    assert sorted(plots) == sorted(f"docs/plots/{plot.name}" for plot in (tmp_path / "docs/plots").glob("*"))
    same_version = f"Matplotlib v{matplotlib.__version__}," in (ROOT / "docs/plots/recall.svg").read_text()
    for file in (*pages, *(plots if same_version else ())):
        assert content(tmp_path / file) == content(ROOT / file), f"{file}: run `make bench-publish`"
        assert len((ROOT / file).read_bytes()) < 200_000


def test_published_figures_are_the_cpus(module: Any) -> None:
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        file = json.loads(path.read_text())
        assert file["provenance"]["processor"]
        assert not file["provenance"]["dirty"]
        for name, found in file["figures"].items():
            assert found["device"] == "cpu", name
            assert found["rounds"] >= 7 or found["passes"] >= 3, name


def test_row_of_a_table(module: Any, tmp_path: Path) -> None:
    report = module("report")
    text = report.table(report.load(folder_of(tmp_path, {"bench_loss[1]": figure()})))
    row = "| loss: N 2,048, D 1,024, M 4, K 256 | 1.0 k vectors | a peer | 2 [1.9, 2.1] | 1.5 | 3.0 |"
    assert row in text.splitlines()
    assert text.endswith(
        "A processor, no AVX-512, 2 threads, drq_fast 0, faiss-cpu absent, commit 012345678 with changes, 2020-01-02."
    )


def test_what_is_too_wide_or_absent_shows_no_figure(module: Any, tmp_path: Path) -> None:
    peers = {"noisy": PEER | {"wide": True, "ratio": 77.0, "rate": 77.0}, "gone": {"absent": "No module named 'gone'"}}
    figures = {f"bench_loss[{D}]": figure(peers=peers, sizes=figure()["sizes"] | {"D": D}) for D in (128, 1024)}
    report = module("report")
    found = report.load(folder_of(tmp_path, figures))
    text = report.table(found) + report.headline(found)
    assert "| noisy | too noisy to publish |" in text
    assert "| gone | absent: No module named 'gone' |" in text
    assert "77" not in text
    panel = module("plots").PLOTS["training"][1][0]
    assert panel.lines(found) == {"drq_fast": [(128, 1000.0), (1024, 1000.0)]}


def test_headline_has_at_most_four_rows(module: Any, tmp_path: Path) -> None:
    """Search is shown on clustered codes, and training by the default loss."""
    report, figures = module("report"), module("figures")
    search = {
        "random": figures.SEARCH | {"codes": "random"},
        "clustered": figures.SEARCH,
        "one": figures.SEARCH | {"Q": 1},
        "ip": figures.SEARCH | {"metric": "ip"},
    }
    found = {name: figure(group="search", sizes=sizes, ours={"rate": 1.0}) for name, sizes in search.items()}
    found |= {"encode": figure(group="encode", sizes=figures.ENCODING), "fit": figure(group="fit")}

    def headline(**figures: Any) -> list[str]:
        text = report.headline(report.load(folder_of(tmp_path, figures)))
        return [line for line in text.splitlines() if line.startswith("| **")]

    squared = figure(sizes=figures.TRAINING | {"loss": "squared"})
    rows = headline(paper=figure(), step=squared, **found)
    assert len(rows) == 4
    assert rows[0] == "| **Training step**: N 2,048, D 1,024, M 4, K 256, loss squared | 1.0 k vectors | 2 x a peer |"
    assert all("metric l2, k 10, codes clustered" in row for row in rows[2:])
    assert "Q 256" in rows[2]
    assert "Q 1," in rows[3]


def test_search_is_plotted_from_new_and_old_figures(module: Any, tmp_path: Path) -> None:
    plots, figures = module("plots"), module("figures")
    for sizes in (figures.SEARCH, plots.OLD_SEARCH):
        content = {f"bench[{Q}]": figure(group="search", sizes=sizes | {"Q": Q}) for Q in (1, 256)}
        assert plots.plot(figures.load(folder_of(tmp_path, content)), tmp_path) == ["search"]
        assert ("clustered" in (tmp_path / "search.svg").read_text()) == ("codes" in sizes)


def test_report_of_a_folder(module: Any, tmp_path: Path) -> None:
    figures = {f"bench_loss[{D}]": figure(sizes=figure()["sizes"] | {"D": D}) for D in (128, 1024)}
    module("report").write(folder_of(tmp_path, figures))
    assert "![training](training.svg)" in (tmp_path / "report.md").read_text()
    plot = (tmp_path / "training.svg").read_bytes()
    module("report").write(tmp_path)
    assert (tmp_path / "training.svg").read_bytes() == plot


def test_blocks_that_have_no_new_content_stay(module: Any) -> None:
    others = "b <!-- bench: y -->\nold\n<!-- end --> <!-- quality: x -->\n<!-- end -->"
    text, new = (f"a <!-- bench: x -->\n{content}\n<!-- end --> {others}" for content in ("old", "new"))
    assert module("report").fill(text, "bench", {"x": "new"}) == new


def test_numbers(module: Any) -> None:
    number = module("figures").number
    values = (13_393_588_086, 999_999, 240_286, 1000, 99.96, 20.3, 1.0, 0.0285)
    assert [number(v) for v in values] == ["13.4 G", "1.0 M", "240 k", "1.0 k", "100", "20.3", "1", "0.0285"]


def test_bound_of_encode_on_paper(module: Any) -> None:
    """D=128, K=256: 65,536 operations, three times on 156 TFLOP/s of TF32, or once on 19.5 of float32."""
    bounds = module("bounds")
    cost, a100 = bounds.encode(128, 256, 4), bounds.GPUS["A100 SXM 80 GB"]
    assert cost.seconds(a100, exact=False) == pytest.approx(3 * 65_536 / 156e12)
    assert cost.seconds(a100, exact=True) == pytest.approx(65_536 / 19.5e12)
    assert cost.limit(a100, exact=False) == "products"
    decode = bounds.decode(128, 256, 4)  # four codewords from the L2 cache
    assert decode.seconds(a100, exact=False) == pytest.approx((516 + 4 * 512) / 7219e9)
    assert decode.limit(a100, exact=False) == "L2"


def test_gpu_check_has_figures_only_if_every_test_passes(module: Any, tmp_path: Path) -> None:
    """With tests and benchmarks of its own, on the CPU."""
    for name in ("conftest.py", "memory.py", "provenance.py"):
        shutil.copy(ROOT / "benchmarks" / name, tmp_path)
    (tmp_path / "test_right.py").write_text("def test_right():\n    pass\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    (tmp_path / "bench_sum.py").write_text(
        "def ours(N, device):\n    return lambda: sum(range(N))\n"
        "def agrees(result, N, device):\n    return result == N * (N - 1) // 2\n"
        "def bench_sum(compare):\n    compare(ours, {}, agrees, sizes={'N': 10}, work=10, unit='numbers')\n"
    )
    gpu_check = module("gpu_check")
    right, wrong, benchmark = (str(tmp_path / name) for name in ("test_right.py", "test_wrong.py", "bench_sum.py"))
    assert gpu_check.check([right], [benchmark], "cpu", tmp_path / "a")
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["tests"] == {"passed": 1, "failed": {}, "skipped": {}}
    assert list(result["figures"]) == ["bench_sum"]
    assert result["provenance"]["processor"]
    assert not gpu_check.check([right, wrong], [benchmark], "cpu", tmp_path / "b")
    result = json.loads((tmp_path / "b" / "result.json").read_text())
    assert len(result["tests"]["failed"]) == 1
    assert result["figures"] == {}
    (tmp_path / "test_dies.py").write_text("import os\ndef test_dies():\n    os.abort()\n")
    dies = str(tmp_path / "test_dies.py")
    assert not gpu_check.check([dies, right], [benchmark], "cpu", tmp_path / "c")
    result = json.loads((tmp_path / "c" / "result.json").read_text())
    assert result["tests"]["failed"] == {dies: "pytest ended with code -6 and left no report"}
    assert result["tests"]["passed"] == 1


@pytest.mark.parametrize("content", [None, "{", "[]", '{"figures": {"a": {"group": "none"}}, "provenance": {}}'])
def test_figures_that_cannot_be_read_leave_the_pages_alone(module: Any, tmp_path: Path, content: str | None) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- bench: headline -->\nold\n<!-- end -->\n")
    if content is not None:
        (tmp_path / "broken.json").write_text(content)
    with pytest.raises(SystemExit, match=r"holds no figures|broken\.json is not a file of figures"):
        module("report").publish(tmp_path, tmp_path)
    assert "old" in (tmp_path / "README.md").read_text()


def test_a_gpu_is_named_only_where_figures_are_its_own(module: Any, tmp_path: Path) -> None:
    figures = module("figures")
    for device, expected in (("cpu", False), ("cuda", True)):
        content = {"provenance": ORIGIN | {"gpu": "H100"}, "figures": {"bench_loss": figure(device=device)}}
        (tmp_path / "some.json").write_text(json.dumps(content))
        assert ("H100" in figures.origin(figures.load(tmp_path))) == expected
