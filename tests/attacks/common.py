"""What all attacks share: random codecs, damaged bytes and JSON, and processes that may crash or hang."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import random
import resource
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from patience import PATIENCE
from tqdm import tqdm

from drq_fast import Codec, Index
from drq_fast.app import cli
from drq_fast.backends.torch import numbers
from drq_fast.index.rows import Content
from drq_fast.index.vectors import DTYPES

METRICS = ("l2", "ip", "cosine")
ODD_JSON: tuple[Any, ...] = (None, -1, 0, 1, 1 << 62, 10**400, 0.5, 1e308, float("nan"), "x", "../x", [], [1e30], {})


class Finding(Exception):
    """The library did what it promises not to do."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Finding(what)


def random_codec(dice: random.Random, D: int | None = None, K: int | None = None) -> Codec:
    D, K, M = D or dice.randint(1, 40), K or dice.choice((2, 3, 16, 100, 256, 300)), dice.randint(1, 6)
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    scale = torch.tensor([dice.choice((1, -1, 1)) * dice.uniform(0.3, 1) ** m for m in range(M)])
    offset = torch.randn(D, generator=generator) if dice.random() < 0.5 else None
    return Codec(torch.randn(K, D, generator=generator), scale, offset)


def random_vectors(dice: random.Random, N: int, D: int) -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(dice.getrandbits(32)))


def random_index(dice: random.Random, codec: Codec, metric: str) -> Index:
    """An empty index that perhaps keeps vectors and perhaps has lists."""
    lists = dice.choice((None, 1, 7, 40))
    centroids = None if lists is None else random_vectors(dice, lists, codec.dim)
    return Index(codec, metric, vectors=dice.choice((None, *DTYPES)), centroids=centroids)


def decoded(index: Index, content: Content, levels: int | None = None) -> torch.Tensor:
    """What codes and lists of an index stand for [n, D], in float64."""
    codec, codes = index.codec, numbers(content.codes)[:, :levels].long()
    x_hat = (codec.scale[: codes.shape[1], None].double() * codec.codebook.double()[codes]).sum(dim=1)
    x_hat = x_hat if codec.offset is None else x_hat + codec.offset.double()
    return x_hat if content.lists is None else x_hat + index._coarse.centroids.double()[content.lists.long()]


def require_in_step(dice: random.Random, index: Index, x: torch.Tensor) -> None:
    """Codes, lists and stored vectors are those of x [n, D], whose rows are in the order of `index.ids`."""
    held, wanted = index._rows.living().content, index._content("add", x, 1)
    for name in ("lists", "vectors", "steps"):
        a, b = getattr(held, name), getattr(wanted, name)
        require((a is None) == (b is None) and (a is None or torch.equal(a, b)), f"{name} belong to other ids")
    errors = [(x.double() - decoded(index, each)).square().sum(dim=1) for each in (held, wanted)]
    require(bool((errors[0] <= 1.001 * errors[1] + 1e-6).all()), "codes belong to other ids")
    if index.vectors is not None and index.metric != "ip":
        some = torch.tensor([dice.randrange(len(x)) for _ in range(8)])
        found = index.search(x[some], k=1, refine=len(x), probes=index.lists).ids[:, 0]
        require(torch.equal(found, index.ids[some]), "a vector does not find itself")


def damaged(dice: random.Random, content: bytes) -> bytes:
    """Some bytes changed, cut off or repeated."""
    data, way = bytearray(content), dice.randrange(3)
    if way == 0:
        return bytes(data[: dice.randrange(len(data))])
    if way == 1:
        first = dice.randrange(len(data))
        return bytes(data) + bytes(data[first : first + dice.randint(1, 64)])
    for _ in range(dice.randint(1, 8)):
        data[dice.randrange(min(len(data), dice.choice((64, 1024, len(data)))))] = dice.randrange(256)
    return bytes(data)


def twisted(dice: random.Random, value: Any) -> Any:
    """A copy of a JSON value in which one or two values are others, missing or new."""
    root = {"": copy.deepcopy(value)}
    for _ in range(dice.randint(1, 2)):
        places = list(_places(root))
        outer = [(root[""], key) for key in root[""]] if isinstance(root[""], dict) else []
        within, key = dice.choice(outer if outer and dice.random() < 0.5 else places)
        way = dice.randrange(8)
        if way == 0 and within is not root:
            del within[key]
        elif way == 1:
            other, its = dice.choice(places)
            within[key] = copy.deepcopy(other[its])
        elif way == 2 and isinstance(within[key], (list, dict)):
            odd = dice.choice(ODD_JSON)
            within[key].append(odd) if isinstance(within[key], list) else within[key].update(x=odd)
        else:
            within[key] = copy.deepcopy(dice.choice(ODD_JSON))
    return root[""]


def _places(tree: Any) -> Any:
    """(container, key) of all values in a tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])


def twisted_json(dice: random.Random, content: bytes) -> bytes:
    """The bytes of a JSON file with damage, or with other values."""
    way = dice.randrange(10)
    if way == 0:
        return damaged(dice, content)
    if way == 1:
        return dice.choice((b"", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"NaN", b'"x"', b"[]"))
    return json.dumps(twisted(dice, json.loads(content))).encode()


def run_command(arguments: Sequence[object], *, codes: Sequence[int] = (0, 1, 2)) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `drq-fast` in this process; the code must be one of `codes`."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = cli.main([str(argument) for argument in arguments])
    told = said.getvalue().strip().splitlines()
    command = " ".join(map(str, arguments))
    require(code in codes, f"{command} ended with {code}: {told[-1:]}")
    require(code == 0 or (bool(told) and told[-1].startswith("drq-fast")), f"{command} failed without a sentence")
    return code, out.getvalue(), said.getvalue()


class Child:
    """A forked process that calls `work`; its result, or its error as a Finding, comes back through a pipe.

    memory: bytes of address space that it may take beyond what this process has.
    """

    def __init__(self, work: Callable[[], Any], memory: int | None = None, one_thread: bool = True) -> None:
        self.pipe, end = os.pipe()
        self.process = os.fork()
        if self.process:
            os.close(end)
            return
        answer: tuple[bool, Any] = False, "it ended early"
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            tqdm.set_lock(threading.RLock())  # a killed process would never release the one that all share
            if one_thread:
                torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            if memory is not None:
                with open("/proc/self/statm") as file:
                    size = int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + memory,) * 2)
            answer = True, work()
        except BaseException:
            answer = False, traceback.format_exc()
        finally:
            with contextlib.suppress(BaseException), open(end, "wb") as file:
                pickle.dump(answer, file)
            os._exit(0)

    def kill(self, after: float) -> None:
        """Kills the process and its children after so many seconds, or as soon as it has ended."""
        select.select([self.pipe], [], [], after)
        self._kill()
        os.close(self.pipe)
        os.waitpid(self.process, 0)

    def result(self, seconds: float = PATIENCE) -> Any:
        """What `work` returned; a Finding if it raised, crashed or did not end in time."""
        content, end = b"", time.monotonic() + seconds
        while True:
            ready, _, _ = select.select([self.pipe], [], [], max(0, end - time.monotonic()))
            part = os.read(self.pipe, 1 << 16) if ready else b""
            content += part
            if not part:
                break
        self._kill()
        os.close(self.pipe)
        _, status = os.waitpid(self.process, 0)
        require(bool(ready), f"a process did not end within {seconds:.0f} s")
        require(bool(content), f"a process ended by signal {os.WTERMSIG(status)}" if status else "a process vanished")
        fine, value = pickle.loads(content)
        require(fine, str(value))
        return value

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process, signal.SIGKILL)
