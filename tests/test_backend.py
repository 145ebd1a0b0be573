"""The choice of backend: explicit ones work or raise, only the automatic choice falls back, with a reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import drq_fast
from drq_fast import BackendUnavailable, backends, functional, use_backend
from drq_fast.app import cli, info
from drq_fast.backends.native import extension
from drq_fast.backends.types import Parameters

CPU = "cpu"
needs_native = pytest.mark.skipif(extension.native is None, reason="the extension is not built")


def choose(*arguments: str) -> str:
    """The name of the backend that is chosen."""
    return backends.choose(*arguments).__name__.removeprefix("drq_fast.backends.")


def test_explicit_choice_works_or_raises(monkeypatch):
    assert choose("adc", CPU, "torch") == "torch"
    with pytest.raises(
        BackendUnavailable, match=r"^decode: backend 'native' cannot be used on cuda: it has no decode for cuda\.$"
    ):
        choose("decode", "cuda", "native")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="it has no decode for cpu"):
        choose("decode", CPU, "triton")


@needs_native
def test_order_of_precedence(monkeypatch):
    assert choose("adc", CPU) == "native"
    monkeypatch.setenv("DRQ_FAST_BACKEND", "torch")
    assert choose("adc", CPU) == "torch"
    with use_backend("native"):
        assert choose("adc", CPU) == "native"
        with use_backend("torch"):
            assert choose("adc", CPU) == "torch"
            assert choose("adc", CPU, "native") == "native"
        assert choose("adc", CPU) == "native"
    assert choose("adc", CPU) == "torch"


def test_names_are_checked(monkeypatch):
    with (
        pytest.raises(ValueError, match="use_backend: name must be one of 'torch', 'native', 'triton', got 'cuda'"),
        use_backend("cuda"),
    ):
        pass
    monkeypatch.setenv("DRQ_FAST_BACKEND", "fast")
    with pytest.raises(
        ValueError, match="adc: DRQ_FAST_BACKEND must be one of 'torch', 'native', 'triton', got 'fast'"
    ):
        choose("adc", CPU)


def test_use_backend_holds_for_its_own_thread_only():
    seen = []
    with use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(choose("adc", CPU)))
        thread.start()
        thread.join()
    assert seen == ["torch" if extension.native is None else "native"]


def test_without_native_code_it_warns_once_and_works(codec, monkeypatch, recwarn):
    monkeypatch.setattr(extension, "native", None)
    monkeypatch.setattr(backends, "_warned", set())
    x, codebook, scale, _ = codec()
    with pytest.warns(UserWarning, match=r"drq_fast runs without its native code: the extension"):
        codes = functional.encode(x, codebook, scale)
    functional.adc(x, codes, codebook, scale)
    assert not recwarn.list
    with pytest.raises(BackendUnavailable, match="cannot be used on cpu: the extension"):
        functional.adc(x, codes, codebook, scale, backend="native")


@needs_native
@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"without_cuda": True}, r"the extension was built without CUDA; reinstall with DRQ_FAST_CUDA=1"),
        ({"driver": 12040}, r"the extension was built with CUDA 13.0, but the driver supports CUDA 12.4; update"),
        ({"driver": 0}, r"the extension was built with CUDA 13.0, but the driver is missing; update the driver"),
        ({"driver": 13000}, None),
        ({"driver": 13020}, None),
    ],
)
def test_a_gpu_search_without_native_code_warns_once(monkeypatch, recwarn, facts, said):
    build = SimpleNamespace(
        cuda="without_cuda" not in facts,
        cuda_runtime_version=lambda: 13000,
        cuda_driver_version=lambda: facts.get("driver"),
        environment=os.environ.get,
    )
    monkeypatch.setattr(extension, "native", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "_warned", set())
    extension._driver_problem.cache_clear()
    try:
        rows = {op: (backend, reason) for op, backend, reason in backends.table("cuda")}
        if said is None:
            assert choose("search", "cuda") == "native"
            assert rows["search"] == ("native", "")
        else:
            with pytest.warns(UserWarning, match=f"without its native code on cuda, where search is .*: {said}"):
                assert choose("search", "cuda") == "torch"
            assert rows["search"][0] == "torch"
            assert re.match(f"native: {said}", rows["search"][1])
        assert choose("search", "cuda") == ("torch" if said else "native")
        assert not recwarn.list
    finally:
        extension._driver_problem.cache_clear()


def test_info_as_text_and_json(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert drq_fast.__version__ in text
    assert torch.__version__ in text
    assert "CUDA" in text
    assert "driver" in text
    for op in backends.OPERATIONS:
        assert op in text
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = {row["operation"]: row for row in facts["backends"]["cpu"]}
    assert rows["adc"]["backend"] == ("torch" if extension.native is None else "native")
    if not torch.cuda.is_available():
        gpu = {row["operation"]: row for row in facts["backends"]["cuda"]}
        assert gpu["decode"]["backend"] == "torch"
        assert "no CUDA device" in gpu["decode"]["why not"] or "not installed" in gpu["decode"]["why not"]


@needs_native
def test_info_tells_what_the_environment_forces(monkeypatch):
    def cpu(op: str) -> dict[str, str]:
        return {row["operation"]: row for row in info.collect_info()["backends"]["cpu"]}[op]

    isas = extension.supported_isas()
    assert info.collect_info()["isa"] == f"{isas[-1]} (of {', '.join(isas)})"
    assert f"isa       {isas[-1]} (of " in info.format_info(info.collect_info())
    monkeypatch.setenv("DRQ_FAST_ISA", "portable")
    assert info.collect_info()["isa"].startswith("portable (of ")
    monkeypatch.setenv("DRQ_FAST_ISA", "foo")
    assert info.collect_info()["isa"].startswith("none: DRQ_FAST_ISA must be one of")
    monkeypatch.setenv("DRQ_FAST_BACKEND", "torch")
    assert cpu("search") == {"operation": "search", "backend": "torch", "why not": "DRQ_FAST_BACKEND=torch"}
    monkeypatch.setenv("DRQ_FAST_BACKEND", "native")
    assert cpu("search")["backend"] == "native"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DRQ_FAST_BACKEND", "triton")
    assert cpu("decode")["backend"] == "none"
    assert "it has no decode for cpu" in cpu("decode")["why not"]
    monkeypatch.setenv("DRQ_FAST_BACKEND", "foo")
    assert cpu("search")["backend"] == "none"
    assert "DRQ_FAST_BACKEND must be one of" in cpu("search")["why not"]


def test_the_command_and_the_module(tmp_path):
    for command in ([sys.executable, "-m", "drq_fast", "info"], [sys.executable, "-m", "drq_fast", "--version"]):
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert drq_fast.__version__ in result.stdout
    bad = subprocess.run([sys.executable, "-m", "drq_fast", "fly"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "unknown command 'fly'" in bad.stderr


def test_works_without_triton(tmp_path):
    """A package named triton whose import fails stands for a missing one."""
    (tmp_path / "triton.py").write_text("raise ImportError('no triton')")
    script = "import drq_fast, sys; drq_fast.RecurrentQuantizer(4); assert 'triton' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_more_levels_than_the_cuda_search_holds_are_a_reason_for_torch(codec):
    x, codebook, scale, _ = codec()
    parameters = Parameters(codebook, scale, None)
    query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)  # no GPU is needed to decide
    long, longer = (torch.zeros(2, extension.MAX_LEVELS + more, dtype=torch.uint8) for more in (0, 1))
    assert backends.cannot_search(query, long, parameters, None) is None
    assert "the codes have" in backends.cannot_search(query, longer, parameters, None)
    assert backends.cannot_search(x, longer, parameters, None) is None  # on the CPU
