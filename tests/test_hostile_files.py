"""Files that change, that lie about their sizes and that are no regular files: an error and no harm."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE

from drq_fast import Codec, FileError, Index, RecurrentQuantizer, files
from drq_fast.files import checksum, header_checksum

X = torch.randn(400, 5, generator=torch.Generator().manual_seed(1))


def make_layer(K: int) -> RecurrentQuantizer:
    layer = RecurrentQuantizer(5, K, 3)
    layer.initialise(X, seed=0)
    return layer


def saved(path: Path, K: int, metric: str = "l2") -> Index:
    index = Index(make_layer(K), metric)
    index.add(X)
    index.save(path)
    return index


def overwrite_codes(path: Path, value: int = 255) -> None:
    """What another process may do to a file that is mapped: all codes become `value`, in place."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    begin, end = header["codes"]["data_offsets"]
    with path.open("r+b") as file:
        file.seek(8 + int.from_bytes(content[:8], "little") + begin)
        file.write(bytes([value]) * (end - begin))


CHANGES: dict[str, Callable[[Index], object]] = {
    "add": lambda index: index.add(X[:1]),
    "upsert": lambda index: index.upsert(X[:1], [3]),
    "remove": lambda index: index.remove(range(300)),
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "search": lambda index: index.search(X[:3]),
    "save": lambda index: index.save("other.drq"),
}


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("K", [100, 300])
def test_codes_that_leave_a_changed_map_are_refused(tmp_path, monkeypatch, K, change, verified):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "a.drq", K)
    index = Index.load("a.drq", mmap=True)
    if verified:
        index.verify()
    overwrite_codes(tmp_path / "a.drq")
    with pytest.raises(FileError, match=r"a\.drq is corrupted \(checksum of 'codes' does not match\)"):
        CHANGES[change](index)
    assert len(index) == 400
    with pytest.raises(FileError, match="is corrupted"):  # nothing of it was kept
        index.search(X[:3])
    assert not Path("other.drq").exists()


@pytest.mark.parametrize("change", ["add", "upsert", "remove", "copy", "search"])
@pytest.mark.parametrize("K", [100, 256, 300])
def test_codes_that_have_left_the_map_do_not_change_with_the_file(tmp_path, monkeypatch, K, change):
    monkeypatch.chdir(tmp_path)
    plain, index = saved(tmp_path / "a.drq", K), Index.load("a.drq", mmap=True)
    results = [CHANGES[change](each) for each in (plain, index)]
    plain, index = results if change == "copy" else (plain, index)
    if K == 256 and change == "search":
        assert index._mapped is not None  # any byte is a code, so the codes may stay on disk
        return
    overwrite_codes(tmp_path / "a.drq")
    assert torch.equal(index.search(X[:9]).scores, plain.search(X[:9]).scores)
    assert torch.equal(index.codes, plain.codes)


def rewrite(path: Path, config: dict | None = None, tensors: dict | None = None) -> None:
    """The same file with other contents and the checksums that belong to them."""
    stored, settings, _ = files.read(path, kind := files_kind(path))
    stored |= tensors or {}
    files.write(path, kind, stored, settings | (config or {}))


def files_kind(path: Path) -> str:
    return re.search(rb'drq_fast\.(\w+)"', path.read_bytes())[1].decode()


def in_little_memory(script: str, *arguments: object) -> None:
    """Runs a script that may allocate 1 GB more than it has after its imports."""
    before = """
        import resource, sys, torch
        from drq_fast import *
        import drq_fast.files
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
    """
    command = [sys.executable, "-c", textwrap.dedent(before) + textwrap.dedent(script), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr


REFUSED = """
    try:
        {load}(sys.argv[1])
    except FileError as error:
        assert {message!r} in str(error), error
    else:
        raise AssertionError("it was loaded")
"""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dim": 10**9}, "codebook must be [8, 1000000000], got [8, 5]"),
        ({"codewords": 65536, "dim": 40000}, "codebook must be [65536, 40000], got [8, 5]"),
        ({"dim": 10**300}, "codebook must be"),
        ({"levels": 10**9}, "levels must be an integer from 1 to 65536, got 1000000000"),
        ({"levels": 10**9, "scale": "per_level"}, "levels must be an integer from 1 to 65536"),
    ],
)
def test_a_small_quantizer_file_does_not_allocate_what_it_claims(tmp_path, config, message):
    make_layer(8).save(tmp_path / "a.drq")
    rewrite(tmp_path / "a.drq", config)
    assert (tmp_path / "a.drq").stat().st_size < 4096
    in_little_memory(REFUSED.format(load="RecurrentQuantizer.load", message=message), tmp_path / "a.drq")


def test_requests_for_more_results_than_vectors_take_little_memory():
    script = """
        layer = RecurrentQuantizer(5, 8, 3)
        layer.initialise(torch.randn(100, 5), seed=0)
        index = Index(layer)
        index.add(torch.randn(10, 5))
        found = index.search(torch.randn(2, 5), k=1 << 20)
        assert found.ids.shape == found.scores.shape == (2, 1 << 20)
        assert (found.ids[:, :10].sort().values == torch.arange(10)).all() and (found.ids[:, 10:] == -1).all()
        assert found.scores[:, 10:].isinf().all()
        try:
            index.search(torch.randn(1, 5), k=500_000_000)
        except ValueError as error:
            assert str(error) == "search: k must be an integer from 1 to 1048576, got 500000000.", error
        else:
            raise AssertionError("it was searched")
    """
    in_little_memory(script)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_missing_results_are_marked(metric, rows):
    index = Index(make_layer(8), metric)
    index.add(X[:rows])
    scores, ids = index.search(X[:4], k=12)
    assert (ids[:, rows:] == -1).all()
    assert (ids[:, :rows].sort(dim=1).values == torch.arange(rows)).all()
    assert (scores[:, rows:] == (torch.inf if metric == "l2" else -torch.inf)).all()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("codec", {"level_weights": [10**400, 1, 1]}),
        ("index", {"level_weights": [10**400, 1, 1]}),
        ("index", {"next_id": 10**400}),
        ("quantizer", {"level_weights": [10**400, 1, 1]}),
        ("quantizer", {"weights": [10**400, 1, 1]}),
        ("quantizer", {"gamma": 10**400}),
        ("quantizer", {"dim": 10**400}),
    ],
)
def test_numbers_beyond_every_float_are_refused(tmp_path, kind, config):
    index = Index(make_layer(8))
    {"codec": index.codec, "index": index, "quantizer": make_layer(8)}[kind].save(tmp_path / "a.drq")
    rewrite(tmp_path / "a.drq", config)
    with pytest.raises(FileError, match="does not describe"):
        {"codec": Codec, "index": Index, "quantizer": RecurrentQuantizer}[kind].load(tmp_path / "a.drq")


def test_numbers_beyond_every_float_in_python():
    codec = make_layer(8).codec()
    with pytest.raises(ValueError, match=r"^Codec: level_weights must be 3 finite numbers >= 0, not all of"):
        Codec(*codec.tensors(), level_weights=[10**400, 1, 1])
    with pytest.raises(ValueError, match=r"^RecurrentQuantizer: weights must be finite numbers >= 0, got \(inf, 1"):
        RecurrentQuantizer(5, loss="paper", weights=(10**400, 1, 1))
    with pytest.raises(ValueError, match=r"^RecurrentQuantizer: commitment must be a finite number >= 0, got 1000"):
        RecurrentQuantizer(5, commitment=10**400)
    with pytest.raises(ValueError, match=r"^RecurrentQuantizer: gamma must be a finite number above 0, got 1000"):
        RecurrentQuantizer(5, gamma=10**400)


@pytest.mark.parametrize("gamma", [0.0, -3.0])
def test_a_quantizer_file_with_an_impossible_gamma(tmp_path, gamma):
    make_layer(8).save(tmp_path / "a.drq")
    rewrite(tmp_path / "a.drq", tensors={"gamma": torch.tensor(gamma)})
    with pytest.raises(FileError, match="gamma must be a finite number above 0"):
        RecurrentQuantizer.load(tmp_path / "a.drq")


def test_a_quantizer_file_without_a_trained_layer(tmp_path):
    make_layer(8).save(tmp_path / "a.drq")
    rewrite(tmp_path / "a.drq", tensors={"_initialised": torch.tensor(False)})
    with pytest.raises(FileError, match="the layer has not seen data yet"):
        RecurrentQuantizer.load(tmp_path / "a.drq")


@pytest.fixture
def impatient():
    """A call that waits for ever fails after a while."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)


@pytest.fixture(params=["fifo", "link"])
def no_file(tmp_path, request) -> Path:
    """A FIFO, or a link to it."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    return tmp_path / request.param


def test_what_is_no_file_is_not_read(no_file, impatient):
    path = no_file
    for load in (Index.load, Codec.load, RecurrentQuantizer.load, lambda p: Index.load(p, mmap=True)):
        with pytest.raises(OSError, match=f"^load: {path} cannot be read: it is not a regular file\\.$"):
            load(path)
    with pytest.raises(OSError, match=f"^op: {path} cannot be read: it is not a regular file\\.$"):
        files.read_array("op", path)
    with pytest.raises(OSError, match="/dev/zero cannot be read: it is not a regular file"):
        Index.load("/dev/zero")


def test_what_is_no_file_is_not_replaced(no_file, impatient):
    index, path, kind = Index(make_layer(8)), no_file, no_file.lstat().st_mode
    for save in (index.save, index.codec.save, make_layer(8).save, lambda p: files.write_text(p, "text")):
        with pytest.raises(OSError, match=f"^save: {path} cannot be written: it is not a regular file\\.$"):
            save(path)
        assert path.is_fifo()
        assert path.lstat().st_mode == kind


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    index = saved(tmp_path / "link", 8)
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"
    assert torch.equal(Index.load(tmp_path / "link").codes, index.codes)
    (tmp_path / "to").symlink_to("link")
    assert torch.equal(Index.load(tmp_path / "to").codes, index.codes)  # a link may be read


def test_remains_of_a_killed_save_are_removed_by_the_next(tmp_path):
    script = """
        import os, signal, sys, drq_fast.files as files
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        files.write(sys.argv[1], "codec", {}, {})
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a.drq")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    remains = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(remains) == 1
    saved(tmp_path / "a.drq", 8)
    assert not remains[0].exists()
    assert subprocess.run(command).returncode == -signal.SIGKILL
    remains = [path for path in tmp_path.iterdir() if path.is_dir()]
    others = (".drq_fast-mine.tmp", ".0123456789abcdef.tmp", "drq_fast-0123456789abcdef.tmp")
    for name in others:  # none of our names
        (tmp_path / name).mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    (tmp_path / ".drq_fast-0123456789abcdef.tmp").symlink_to(elsewhere)
    with files.temporary_folder(tmp_path) as busy:
        saved(tmp_path / "a.drq", 8)
        assert busy.is_dir()  # somebody is writing into it
    assert not remains[0].exists()
    assert (elsewhere / "mine").exists()
    assert all((tmp_path / name).is_dir() for name in others)
    assert not busy.exists()


def test_the_same_contents_give_the_same_bytes(tmp_path):
    index = saved(tmp_path / "a.drq", 8)
    layer = make_layer(8)
    for save in (index.save, index.codec.save, layer.save):
        contents = set()
        for n in range(8):
            save(tmp_path / f"{n}.drq")
            contents.add((tmp_path / f"{n}.drq").read_bytes())
        assert len(contents) == 1


@pytest.mark.parametrize("dtype", [*files._DTYPES, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (3, 5)])
def test_tensors_of_every_dtype_come_back(tmp_path, dtype, shape):
    tensors = {"b": torch.arange(15).to(dtype)[: int(np.prod(shape))].reshape(shape), "ä": torch.ones(3).bool()}
    if dtype is torch.complex64:
        with pytest.raises(TypeError, match=r"save: b must be of a dtype that safetensors stores, got torch"):
            files.write(tmp_path / "a", "codec", tensors, {})
        return
    files.write(tmp_path / "a", "codec", tensors, {"x": 1})
    found, config, checksums = files.read(tmp_path / "a", "codec")
    assert config == {"x": 1}
    assert found.keys() == tensors.keys() == checksums.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert checksums[name] == checksum(tensor)


def test_a_full_disk_leaves_no_temporary_folder(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match=r"save: .* cannot be written: File too large"):
            saved(tmp_path / "a.drq", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_the_header_of_a_file_is_sealed():
    header = {"kind": "drq_fast.codec", "version": "2"}
    assert header_checksum(header) == header_checksum(header | {"header": "x"}) != header_checksum({"kind": "other"})
