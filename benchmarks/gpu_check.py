"""On a machine with an NVIDIA GPU: the tests of the GPU code, then the quick benchmarks, on that GPU.

`make gpu-check` writes out/gpu-check/result.json, the file to send back: provenance, tests and, if no test failed,
figures; and report.md beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

ROOT = Path(__file__).parents[1]
TESTED = (
    "compile",
    "triton_encode",
    "triton_distortion",
    "triton_quantize",
    "triton_squared",
    "decode",
    "adc",
    "cuda_search",
    "cuda_lists",
    "precision",
    "gpus",
)


def check(tests: list[str], benchmarks: list[str], device: str, folder: Path) -> bool:
    """Runs both and writes result.json in `folder`; was everything right?"""
    folder.mkdir(parents=True, exist_ok=True)
    found = run_tests(tests, folder / "tests.xml")
    right = found["passed"] > 0 and not found["failed"]
    figures = run_benchmarks(benchmarks, device, folder / "figures.json") if right else {}
    result = {"provenance": provenance(), "tests": found, "figures": figures}
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    return right and bool(figures)


def run_tests(tests: list[str], report: Path) -> dict[str, Any]:
    """How many passed, and the names of those that failed or were skipped, with the reason."""
    found: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
    for test in tests:  # a process for each file: one that dies takes no other with it
        report.unlink(missing_ok=True)
        code = pytest(*test.split(), f"--junitxml={report}")
        try:
            add_cases(found, xml.etree.ElementTree.parse(report))
        except (OSError, xml.etree.ElementTree.ParseError):
            found["failed"][test] = f"pytest ended with code {code} and left no report"
    return found


def add_cases(found: dict[str, Any], report: Any) -> None:
    for case in report.iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            found["passed"] += 1
        else:
            kind = "skipped" if outcome.tag == "skipped" else "failed"
            found[kind][f"{case.get('classname')}.{case.get('name')}"] = outcome.get("message", "")[:300]


def run_benchmarks(benchmarks: list[str], device: str, file: Path) -> dict[str, Any]:
    file.unlink(missing_ok=True)
    pytest(*benchmarks, f"--device={device}", "--benchmark-quiet", f"--benchmark-json={file}")
    figures = json.loads(file.read_text())["figures"] if file.exists() and file.stat().st_size else {}
    file.unlink(missing_ok=True)
    return figures


def pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu-check: torch sees no CUDA device")
    folder = ROOT / "out" / "gpu-check"
    os.environ["DRQ_FAST_CASES"] = "100"  # of random kernels
    tests = [*(f"tests/test_{name}.py" for name in TESTED), "tests/test_fuzz.py -k kernels"]
    right = check(tests, ["benchmarks", "-m", "quick"], "cuda", folder)
    subprocess.run([sys.executable, str(ROOT / "benchmarks/report.py"), str(folder)], check=False)
    print(f"{'All is well' if right else 'Something is wrong'}: please send {folder / 'result.json'}")
    sys.exit(not right)


if __name__ == "__main__":
    main()
