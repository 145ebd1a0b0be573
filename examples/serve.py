"""Search over HTTP with Ray Serve: JSON in, JSON out, two replicas, one index in shards.

    python examples/serve.py [FOLDER_OF_SHARDS] [--port 8000] [--address RAY_CLUSTER] [--stay]
    curl localhost:8000 -d '{"query": [0.1, ...], "k": 5}'

Needs `pip install 'drq_fast[ray]' 'ray[serve]'`. On a busy machine set RAY_worker_niceness=0: Ray's processes have
niceness 15 by default, and its start waits for them.

Queries that arrive together are answered by one search. Without a folder it makes shards of random vectors, sends a
hundred requests at once, compares the answers with those of one index, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

try:
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import JSONResponse
except ImportError as error:
    sys.exit(f"examples/serve.py: {error.name} is missing; `pip install 'drq_fast[ray]' 'ray[serve]'` installs it.")

import drq_fast
from drq_fast.interop.ray import ShardedIndex


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=256)
class Search:
    """Answers {"query": [dim numbers], "k": 10} by {"ids": [...], "scores": [...]}."""

    def __init__(self, index: ShardedIndex) -> None:
        self.index = index

    @serve.batch(max_batch_size=256, batch_wait_timeout_s=0.002)
    async def together(self, queries: list[list[float]], ks: list[int]) -> list[dict[str, list[Any]]]:
        """One search for all queries that wait; each gets as many of the results as it asked for."""
        scores, ids = await asyncio.to_thread(self.index.search, torch.tensor(queries), max(ks))
        rows = zip(ids.tolist(), scores.tolist(), ks, strict=True)
        return [{"ids": row[:k], "scores": score[:k]} for row, score, k in rows]

    async def __call__(self, request: Request) -> JSONResponse:
        """One request."""
        try:
            asked = await request.json()
            query, k = [float(number) for number in asked["query"]], int(asked.get("k", 10))
            if len(query) != self.index.dim or not 1 <= k <= 1000:
                raise ValueError(f"query must have {self.index.dim} numbers, and k must be from 1 to 1000")
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse(await self.together(query, k))


def ask(port: int, query: list[float], k: int) -> dict[str, Any]:
    """The answer to one query."""
    body = json.dumps({"query": query, "k": k}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", body, timeout=300) as answer:
        return json.loads(answer.read())


def make_shards(x: torch.Tensor, folder: str) -> drq_fast.Index:
    """An index of x [N, D], and two shards of it in the folder."""
    index = drq_fast.Index.build(x, bits=32, lists=None, tune=False)
    for s in range(2):
        shard = drq_fast.Index(index.codec)
        shard.add_codes(index.codes[s::2], ids=index.ids[s::2])
        shard.save(Path(folder, f"{s}.drq"))
    return index


def main() -> None:
    """Starts the service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="*.drq files of one codec (default: of random vectors)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--address", help="of a Ray cluster (default: start one on this machine)")
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        x = torch.randn(2000, 16)
        index = make_shards(x, folder) if options.folder is None else None
        if options.address is None:
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
        else:
            ray.init(address=options.address, log_to_driver=False)
        serve.start(http_options={"port": options.port})
        with ShardedIndex(options.folder or folder, timeout=300) as sharded:  # its actors end with it
            serve.run(Search.bind(sharded))
            if index is not None:
                with ThreadPoolExecutor(32) as threads:
                    answers = list(threads.map(lambda q: ask(options.port, q, 5), x[:100].tolist()))
                assert [answer["ids"] for answer in answers] == index.search(x[:100], k=5).ids.tolist()
                print(f"{len(answers)} answers, all as of one index; the first: {answers[0]}", flush=True)
            while options.stay:
                time.sleep(1)
            serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
