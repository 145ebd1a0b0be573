"""The reader of CIFAR's pickles: what batches contain, and nothing else."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from drq_fast.files import FileError
from drq_fast.retrieval import datasets, pickles

BATCH = {
    b"data": np.arange(3072).astype(np.uint8)[None],
    b"labels": [7],
    b"numbers": np.array([3, -1]),
    b"bytes": np.array([255], np.uint8),
    b"filenames": [b"a.png", "b"],
    b"nothing": (None, True, False, (), [], {}, 1 << 20),
}
# As Python 2 wrote the original files.
PYTHON2 = (
    b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x01xU\x06labelsq\x04]q\x05(K\x06eU\x04dataq\x06cnumpy.core.multiarray\n"
    b"_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1"
    b"K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
    + bytes(3072)
    + b"tbu."
)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4])
def test_batches_of_all_protocols(protocol):
    found = pickles.read(pickle.dumps(BATCH, protocol))
    assert found.keys() == BATCH.keys()
    for key, value in BATCH.items():
        if isinstance(value, np.ndarray):
            assert found[key].dtype == value.dtype
            assert np.array_equal(found[key], value)
        else:
            assert found[key] == value


def test_a_batch_of_python_2():
    found = pickles.read(PYTHON2)
    assert found[b"labels"] == [6]
    assert found[b"batch_label"] == b"x"
    assert np.array_equal(found[b"data"], np.zeros((1, 3072), np.uint8))


def array_of(name: bytes, state: bytes, raw: bytes) -> bytes:
    """A pickle of an array [1] with this dtype and these bytes."""
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01K\x01\x85cnumpy\ndtype\n"
    return b"\x80\x03" + made + b"C\x02" + name + b"K\x00K\x01\x87R" + state + b"b\x89C\x08" + raw + b"tb."


@pytest.mark.parametrize(
    "content",
    [
        array_of(b"O8", b"(K\x03C\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t", b"\x41" * 8),  # a pointer
        array_of(b"i8", b"(K\x03C\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ft", b"\x41" * 8),
        array_of(b"i8", b"(K\x03C\x01<NNNK\x01K\x01K\x00t", b"\x41" * 8),
        array_of(b"i8", b"(K\x03C\x01<C\x01xN}J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t", b"\x41" * 8),
        pickle.dumps(np.array([None]), 2),
        pickle.dumps(np.array([0.5]), 2),
        pickle.dumps(np.array(["text"]), 2),
        pickle.dumps(np.zeros(3, [("a", "u1")]), 2),
        pickle.dumps({1, 2}),
        pickle.dumps(print),
        b"\x80\x02Nr\xff\xff\xff\xff0.",  # a memo of many gigabytes for pickle.Unpickler
        b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",  # a key whose hash overflows the C stack
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00zip\x86R.",
        b"\x80\x02(.",
        b"\x80\x02t.",
        b"\x80\x02.",
        b"\x80\x02NN.",
        b"\x80\x02Na.",
        b"",
    ],
)
def test_everything_else_is_refused(content, tmp_path):
    with pytest.raises(pickle.UnpicklingError, match=r"^it "):
        pickles.read(content)
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"^datasets: .*data_batch_1 is not a batch of CIFAR-10 \(.*\)\.$"):
        datasets.cifar10(tmp_path)


def test_labels_that_are_pointers_are_refused(tmp_path):
    pointers = array_of(b"O8", b"(K\x03C\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t", b"\x41" * 8)
    data = pickle.dumps(np.zeros((1, 3072), np.uint8), 3)
    batch = b"\x80\x03}(C\x04data" + data[2:-1] + b"C\x06labels" + pointers[2:-1] + b"u."
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(batch)
    with pytest.raises(FileError, match=r"data_batch_1 is not a batch of CIFAR-10"):
        datasets.cifar10(tmp_path)


def test_labels_of_labels_are_refused(tmp_path):
    labels: list = []
    for _ in range(60):
        labels = [labels, labels]  # 2^60 for numpy
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(BATCH | {b"labels": labels}, 2))
    with pytest.raises(FileError, match="its labels integers"):
        datasets.cifar10(tmp_path)


def test_damaged_batches_are_read_or_refused(tmp_path):
    """Mutations of valid pickles: every outcome is plain data or one error."""
    valid = [pickle.dumps(BATCH, protocol) for protocol in (1, 2, 4)] + [PYTHON2]
    short = [content.replace(bytes(3072), b"") for content in valid]
    generator, outcomes = random.Random(0), {"read": 0, "refused": 0}
    path = tmp_path / "batch"
    for _ in range(2000):
        content = bytearray(generator.choice(generator.choice((valid, short))))
        for _ in range(generator.randint(1, 4)):
            at, other = generator.randrange(len(content)), generator.choice(valid)
            if generator.random() < 0.7:  # near the structure rather than among the pixels
                at = generator.choice((at % 400, len(content) - 1 - at % 400)) % len(content)
            piece = generator.randrange(len(other))
            new = generator.choice((generator.randbytes(1), b"", other[piece : piece + generator.randint(1, 40)]))
            content[at : at + generator.randint(0, 3)] = new
        path.write_bytes(content)
        try:
            assert plain(pickles.read(bytes(content)), 0)
            pixels, labels = datasets._python_batch(path)
            assert (pixels.dtype, labels.dtype) == (np.uint8, np.int64)
            outcomes["read"] += 1
        except (pickle.UnpicklingError, FileError):
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100


def plain(value: object, depth: int) -> bool:
    """Whether these are only the kinds of data that a batch contains."""
    if depth > 10 or isinstance(value, (pickles._Global, pickles._Dtype, pickles._Unfilled)):
        return True  # names of functions, which nobody calls
    if isinstance(value, np.ndarray):
        return value.dtype in (np.uint8, np.int64)
    if isinstance(value, dict):
        return all(plain(part, depth + 1) for part in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple)):
        return all(plain(part, depth + 1) for part in value)
    return value is None or type(value) in (bool, int, str, bytes)
