"""Files of an index: written whole, and refused when they are not."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drq_fast import FileError, Index, RecurrentQuantizer, files
from drq_fast.files import checksum, header_checksum


def make_layer(D: int = 5, K: int = 16, M: int = 3, **options) -> RecurrentQuantizer:
    torch.manual_seed(0)
    layer = RecurrentQuantizer(D, K, M, **options)
    layer.initialise(torch.randn(400, D) + 1, seed=0)
    return layer


LAYER = make_layer()
X = torch.randn(300, 5, generator=torch.Generator().manual_seed(1)) + 1


@pytest.fixture
def saved(tmp_path):
    index = Index(LAYER, "cosine")
    index.add(X, ids=torch.arange(300).flip(0) * 3)
    index.remove([9, 30])
    index.save(tmp_path / "a.drq")
    return index, tmp_path / "a.drq"


@pytest.mark.parametrize("mmap", ["x", "r", 1, None])
def test_mmap_is_true_or_false(saved, mmap):
    with pytest.raises(TypeError, match=rf"^load: mmap must be True or False, got {mmap!r}\.$"):
        Index.load(saved[1], mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_save_and_load(saved, mmap):
    index, path = saved
    other = Index.load(path, mmap=mmap)
    assert repr(other) == repr(index) == "Index(298 vectors of 5 dimensions in 12 bits, metric='cosine')"
    for levels in (1, 2, 3):
        a, b = index.search(X[:9], levels=levels), other.search(X[:9], levels=levels)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.scores, b.scores)
    other.verify()
    assert other.add(X[:1]).tolist() == index.add(X[:1]).tolist() == [898]
    other.remove([898])
    other.save(path)  # over the file that it came from
    assert torch.equal(Index.load(path).ids, other.ids)
    assert [p.name for p in path.parent.iterdir()] == ["a.drq"]


def rewrite(path, change_tensors=lambda t: None, change_header=lambda h: None, fix_checksums=True, seal=True):
    """The same file with other contents."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        header = file.metadata()
    change_tensors(tensors)
    if fix_checksums:
        header["checksums"] = json.dumps({name: checksum(t) for name, t in tensors.items()})
    change_header(header)
    if seal and header:
        header["header"] = header_checksum(header)
    save_file(tensors, path, metadata=header)


def test_flipped_bits_are_noticed(saved):
    _, path = saved
    whole = path.read_bytes()
    for name, on_load in (("codes", False), ("ids", True), ("codebook", True), ("offset", True), ("scale", True)):
        path.write_bytes(whole)
        rewrite(path, lambda t, name=name: t[name].view(torch.uint8).flatten()[5].bitwise_xor_(1), fix_checksums=False)
        with pytest.raises(FileError, match=f"is corrupted \\(checksum of '{name}' does not match\\)"):
            Index.load(path)
        if on_load:
            with pytest.raises(FileError, match="is corrupted"):
                Index.load(path, mmap=True)
        else:
            index = Index.load(path, mmap=True)
            changes = {
                "verify": index.verify,
                "add": lambda index=index: index.add(X),
                "remove": lambda index=index: index.remove(index.ids[:200]),
                "save": lambda index=index: index.save(path.with_name("b.drq")),
            }
            for op, change in changes.items():
                with pytest.raises(FileError, match=f"^{op}: .* is corrupted"):
                    change()
                assert len(index) == 298
            assert not path.with_name("b.drq").exists()


@pytest.mark.parametrize(
    ("old", "new"), [("[0.5, 1.0, 1.0]", "[0.5, 1.0, 3.0]"), ("898", "998"), ("cosine", "kosine"), ("metric", "netric")]
)
@pytest.mark.parametrize("mmap", [False, True])
def test_flipped_bits_of_the_header_are_noticed(tmp_path, old, new, mmap):
    path = tmp_path / "a.drq"
    index = Index(make_layer(level_weights=(0.5, 1, 1)), "cosine")
    index.add(X[:1], ids=[897])
    index.save(path)
    assert old in path.read_bytes().decode(errors="replace")
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
    with pytest.raises(FileError, match=r"is corrupted \(checksum of its header does not match\)"):
        Index.load(path, mmap=mmap)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("mmap", [False, True])
def test_truncated_files_are_refused(saved, keep, mmap):
    _, path = saved
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(FileError, match="is not a complete safetensors file"):
        Index.load(path, mmap=mmap)


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        (
            lambda t: None,
            lambda h: h.update(version="4"),
            "has format version 4, newer than the 3 that this drq_fast reads",
        ),
        (lambda t: None, lambda h: h.update(version="x"), "is corrupted (its version is 'x')"),
        (lambda t: None, lambda h: h.update(kind="somebody.else"), "was not written by drq_fast"),
        (lambda t: None, lambda h: h.clear(), "was not written by drq_fast"),
        (lambda t: None, lambda h: h.update(kind="drq_fast.quantizer"), "holds a quantizer, not an index"),
        (lambda t: None, lambda h: h.update(config="[]"), "is corrupted"),
        (lambda t: None, lambda h: h.update(config="{}"), "does not describe an index"),
        (lambda t: None, lambda h: h.update(checksums="{}"), "is corrupted"),
        (
            lambda t: None,
            lambda h: h.update(config=h["config"].replace("cosine", "manhattan")),
            "metric must be one of",
        ),
        (lambda t: None, lambda h: h.update(version="9" * 5000), "is corrupted"),
        (lambda t: None, lambda h: h.update(version="0"), "is corrupted"),
        (lambda t: None, lambda h: h.update(config="[" * 100_000), "is corrupted"),
        (
            lambda t: None,
            lambda h: h.update(config=h["config"].replace("898", str(2**63))),
            "next_id must be an integer",
        ),
        (
            lambda t: t.update(more=t["ids"].clone()),
            lambda h: None,
            "tensors must be codebook, scale, codes and perhaps offset, ids, vectors, steps, centroids and lists",
        ),
        (lambda t: t.update(codebook=t["codebook"].double()), lambda h: None, "codebook must be torch.float32"),
        (lambda t: t.pop("codes"), lambda h: None, "does not describe an index"),
        (
            lambda t: t.update(codes=t["codes"].long()),
            lambda h: None,
            "codes must be torch.uint8 [N, 3], got torch.int64",
        ),
        (lambda t: t.update(codes=t["codes"][:, :2].clone()), lambda h: None, "codes must be torch.uint8 [N, 3]"),
        (lambda t: t["codes"].fill_(16), lambda h: None, "codes must be in 0..15"),
        (lambda t: t.update(ids=t["ids"][:-1].clone()), lambda h: None, "ids must be torch.int64 [298]"),
        (lambda t: t["ids"].fill_(5), lambda h: None, "ids must be unique"),
        (lambda t: t["ids"][0].fill_(-5), lambda h: None, "ids must be unique"),
        (lambda t: t.update(scale=t["scale"][:2].clone()), lambda h: None, "codebooks must be a divisor of 2"),
        (lambda t: t.update(codebook=t["codebook"][:, :4].clone()), lambda h: None, "offset must be [4]"),
        (lambda t: t["codebook"][0, 0].fill_(float("nan")), lambda h: None, "codebook must be finite"),
        (lambda t: t["scale"][1].fill_(float("inf")), lambda h: None, "scale must be finite"),
    ],
)
def test_foreign_newer_and_inconsistent_files_are_refused(saved, tensors, header, message):
    _, path = saved
    rewrite(path, tensors, header)
    with pytest.raises(FileError) as caught:
        Index.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_codes_out_of_range_in_a_mapped_file_never_reach_a_scan(saved):
    _, path = saved
    rewrite(path, lambda t: t["codes"].fill_(200))  # K is 16
    index = Index.load(path, mmap=True)
    with pytest.raises(FileError, match=r"search: codes must be in 0..15, got values from 200 to 200\."):
        index.search(X[:1])


def test_mapped_codes_stay_on_disk_until_used(tmp_path):
    MEGABYTES = 256
    index = Index(make_layer(K=256, M=64, init="random"))
    index.add_codes(torch.zeros(MEGABYTES << 14, 64, dtype=torch.uint8))
    index.save(tmp_path / "a.drq")
    script = (
        "import resource, sys; from drq_fast import Index\n"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() >> 20\n"
        "before = rss(); index = Index.load(sys.argv[1], mmap=True); print(rss() - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.drq")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < MEGABYTES // 2


def test_unreadable_and_unwritable_paths(tmp_path, monkeypatch):
    index = Index(LAYER)
    monkeypatch.chdir(tmp_path)
    for call, error, message in (
        (lambda: Index.load("missing.drq"), FileNotFoundError, "load: missing.drq cannot be read: No such file"),
        (lambda: Index.load("."), IsADirectoryError, r"load: \. cannot be read: Is a directory"),
        (lambda: index.save("folder/a.drq"), FileNotFoundError, "save: folder/a.drq cannot be written: No such file"),
        (lambda: index.save("\udcff"), ValueError, r"save: path must be valid UTF-8, as safetensors requires, got '"),
        (lambda: Index.load("\udcff"), ValueError, r"load: path must be valid UTF-8, as safetensors requires, got '"),
        (lambda: index.save(""), IsADirectoryError, r"save: \. cannot be written: it is a folder\."),
        (lambda: index.save("."), IsADirectoryError, r"save: \. cannot be written: it is a folder\."),
        (lambda: index.save("/"), IsADirectoryError, r"save: / cannot be written: it is a folder\."),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["n" * 255, "a b.drq", "ü"])
def test_any_name_that_the_file_system_takes(tmp_path, name):
    index = Index(LAYER)
    index.add(X)
    index.save(tmp_path / name)
    for mmap in (False, True):
        assert torch.equal(Index.load(tmp_path / name, mmap=mmap).codes, index.codes)


def test_devices_that_are_not_there(tmp_path):
    Index(LAYER).save(tmp_path / "a.drq")
    LAYER.save(tmp_path / "b.drq")
    missing = ["zzz", 1.5] if torch.cuda.is_available() else ["zzz", 1.5, "cuda"]
    for device in missing:
        for op, call in (
            ("Index", lambda device=device: Index(LAYER, device=device)),
            ("load", lambda device=device: Index.load(tmp_path / "a.drq", device=device)),
            ("load", lambda device=device: RecurrentQuantizer.load(tmp_path / "b.drq", device=device)),
        ):
            with pytest.raises(ValueError, match=f"^{op}: device must be an available device, got {device!r}"):
                call()


def test_disk_full_while_saving_keeps_the_old_file(saved):
    index, path = saved
    before = path.read_bytes()
    index.add(X.repeat(100, 1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"save: .* cannot be written"):
            index.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.drq"]
    assert len(Index.load(path)) == 298


@pytest.mark.parametrize("write", [files.write_text, lambda path, text: files.write_array(path, np.arange(3))])
def test_every_write_removes_remains_of_killed_processes(tmp_path, write):
    (tmp_path / ".drq_fast-0123456789abcdef.tmp").mkdir()
    (tmp_path / ".drq_fast-0123456789abcdef.tmp/new").write_text("unfinished")
    write(tmp_path / "a", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_system_that_opens_no_folders(tmp_path, monkeypatch):
    """Windows: neither folders nor files that are open for reading can be locked or synced."""
    opened = os.open

    def refuse(path, *rest):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *rest)

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("shutil._use_fd_functions", False)  # as there
    monkeypatch.delattr(os, "O_NOFOLLOW")
    monkeypatch.delattr(os, "O_DIRECTORY")
    monkeypatch.delattr(os, "fsync")
    (tmp_path / ".drq_fast-0123456789abcdef.tmp").mkdir()
    for text in ("first", "second"):
        with files.locked(tmp_path):
            files.write_text(tmp_path / "a.txt", text)
        assert (tmp_path / "a.txt").read_text() == text
    assert len(list(tmp_path.iterdir())) == 2  # remains stay there
