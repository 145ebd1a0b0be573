"""Bytes and operations of every GPU kernel for one vector, and what the peaks allow: an argument on paper.

`python benchmarks/bounds.py` prints the tables of docs/gpu.md. Bytes are those that must pass through the GPU's memory.
Codebook, G and what a program reads again come from the L2 cache, through which the bytes of the memory pass as well.
Operations of products count an FMA as two; others are single additions, multiplications and comparisons, of which a GPU
does half as many a second.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class GPU(NamedTuple):
    """Peaks: bytes/s of the memory and of the L2 cache (5120 a clock), operations/s in float32 and dense TF32."""

    memory: float
    l2: float
    float32: float
    tf32: float


GPUS = {"A100 SXM 80 GB": GPU(2039e9, 7219e9, 19.5e12, 156e12), "H100 SXM": GPU(3350e9, 8986e9, 66.9e12, 494.7e12)}
# Other operations for a score and level. Forward: key 3, d and its root 3, exp 2, sum and quotient 2, Delta 2, t 2,
# inner products 4; again: without key and inner products; backward: the recursion of docs/math.md, section 3.
FORWARD, AGAIN, BACKWARD = 18, 11, 25
WIDTH = 16  # of the beam


class Cost(NamedTuple):
    """Of one vector: bytes of the memory, further bytes of the L2 cache, operations of products inside a kernel, of
    torch's products, and others."""

    bytes: float = 0
    cached: float = 0
    inside: float = 0
    torch: float = 0
    others: float = 0

    def seconds(self, gpu: GPU, exact: bool) -> float:
        """The largest of what memory, products and other operations take at the least."""
        inside = self.inside / gpu.float32 if exact else 3 * self.inside / gpu.tf32  # tf32x3: three products for one
        traffic = max(self.bytes / gpu.memory, (self.bytes + self.cached) / gpu.l2)
        return max(traffic, inside + self.torch / gpu.float32, 2 * self.others / gpu.float32)

    def limit(self, gpu: GPU, exact: bool) -> str:
        """What that is."""
        memory, l2 = Cost(bytes=self.bytes), Cost(bytes=self.bytes, cached=self.cached)
        kinds = {"memory": memory._replace(cached=0), "L2": l2, "other operations": Cost(others=self.others)}
        longest = max(kinds, key=lambda kind: kinds[kind].seconds(gpu, exact))
        return longest if kinds[longest].seconds(gpu, exact) >= self.seconds(gpu, exact) else "products"


def encode(D: int, K: int, M: int) -> Cost:
    """x in, codes out; x C^T inside, the codebook once for 32 vectors; then key 3 and t 2 for each score and level."""
    return Cost(bytes=4 * D + M, cached=4 * K * D / 32 + 4 * K * (M - 1), inside=2 * K * D, others=5 * M * K)


def encode_with_scores_in_memory(D: int, K: int, M: int) -> Cost:
    """If another kernel wrote the scores, and this one read them."""
    return encode(D, K, M)._replace(bytes=4 * D + M + 8 * K)


def encode_tiled(D: int, K: int, M: int) -> Cost:
    """Scores read and written once a level, codes of 4 bytes."""
    return Cost(bytes=8 * K * M + 4 * M, cached=4 * K * (M - 1), others=5 * M * K)


def paths(M: int) -> int:
    """Paths that are extended, of all levels together."""
    return 1 + (M - 1) * WIDTH


def beam_errors(D: int, K: int, M: int) -> Cost:
    """Scores read once a level; the errors of all extended paths written; t from the rows of G of the levels before."""
    rows = sum(m * (1 if m == 0 else WIDTH) for m in range(M))
    cached = 4 * K * (rows + paths(M) - M)
    return Cost(bytes=4 * K * (M + paths(M)), cached=cached, others=K * (2 * rows + 5 * paths(M)))


def beam_select(D: int, K: int, M: int) -> Cost:
    """Errors read, again twice or 34 times; key 2, and 32 comparisons and sums to find the limit."""
    again = 2 if WIDTH * K <= 4096 else 34
    return Cost(bytes=4 * K * paths(M), cached=4 * K * paths(M) * again, others=66 * K * paths(M))


def distortion(D: int, K: int, M: int) -> Cost:
    """Scores in, Delta of all levels, codes and two numbers a level out; a row of G a level."""
    return Cost(bytes=4 * K + 4 * K * M + 16 * M, cached=4 * K * M, others=FORWARD * M * K)


def distortion_again(D: int, K: int, M: int) -> Cost:
    """Scores in, Delta and t of all levels out; a row of G a level."""
    return Cost(bytes=4 * K + 8 * K * M + 8 * M, cached=4 * K * M, others=AGAIN * M * K)


def joint(D: int, K: int, M: int) -> Cost:
    """Delta in and J out; Delta C or Delta G inside, 64 of its columns at a time, by 128 lines."""
    by_codewords = D % 16 == 0 and 2 * D <= K
    width = D if by_codewords else K
    again = math.ceil(width / 64) - by_codewords  # Delta itself, for <Delta G, Delta>
    return Cost(bytes=(4 * K + 12) * M, cached=(4 * K * again + 4 * K * width / 128) * M, inside=2 * K * width * M)


def products(D: int, K: int, M: int) -> Cost:
    """Delta in and Delta G out."""
    again = math.ceil(K / 64) - 1
    return Cost(bytes=8 * K * M, cached=(4 * K * again + 4 * K * K / 128) * M, inside=2 * K * K * M)


def distortion_backward(D: int, K: int, M: int) -> Cost:
    """Scores, t, Delta and Delta G of all levels in; dS and dt of all levels out; a row of G a level."""
    return Cost(bytes=8 * K + 16 * K * M, cached=4 * K * M, others=BACKWARD * M * K)


def scatter(D: int, K: int, M: int) -> Cost:
    """dt of all levels in, and their order."""
    return Cost(bytes=4 * K * M + 8 * M, others=M * K)


def squared(D: int, K: int, M: int) -> Cost:
    """x and codes in; for every 128 dimensions a number a level out."""
    return Cost(bytes=4 * D + 8 * M + 4 * M * math.ceil(D / 128), cached=4 * M * D, others=4 * M * D)


def squared_backward(D: int, K: int, M: int) -> Cost:
    """x, codes and derrors in; pulls of all levels and doffset out; residuals stay in L2."""
    return Cost(bytes=8 * D + 4 * M * D + 12 * M, cached=16 * M * D, others=7 * M * D)


def scatter_pulls(D: int, K: int, M: int) -> Cost:
    """Pulls of all levels in, and their order."""
    return Cost(bytes=4 * M * D + 8 * M, others=M * D)


def level(D: int, K: int, M: int) -> Cost:
    """At each level: t twice and Delta in, both out."""
    return Cost(bytes=20 * K * M, cached=12 * K * M, others=FORWARD * M * K)


def level_backward(D: int, K: int, M: int) -> Cost:
    """At each level: four rows in, two in and out, one out."""
    return Cost(bytes=36 * K * M, cached=16 * K * M, others=BACKWARD * M * K)


def decode(D: int, K: int, M: int) -> Cost:
    return Cost(bytes=4 * D + M, cached=4 * M * D, others=2 * M * D)


def lookup(D: int, K: int, M: int) -> Cost:
    """A code in, a sum out, for each query."""
    return Cost(bytes=M + 4, others=2 * M)


def queue(D: int, K: int, M: int) -> Cost:
    """A code and its norm, for one query; the rest is compared."""
    return Cost(bytes=M + 4, others=2 * M + 3)


def select(D: int, K: int, M: int) -> Cost:
    """Three passes: two digits and the collection."""
    return Cost(bytes=3 * (M + 4), others=3 * (2 * M + 3))


KERNELS = [  # name, cost, sizes D, K, M
    ("`encode_kernel`", encode, (128, 256, 4)),
    ("`encode_kernel`", encode, (2048, 256, 4)),
    ("the same with the scores in memory", encode_with_scores_in_memory, (128, 256, 4)),
    ("the same with the scores in memory", encode_with_scores_in_memory, (2048, 256, 4)),
    ("`encode_tiled_kernel`", encode_tiled, (128, 1024, 4)),
    (f"`beam_errors_kernel`, beam {WIDTH}", beam_errors, (128, 256, 4)),
    (f"`beam_select_kernel`, beam {WIDTH}", beam_select, (128, 256, 4)),
    ("`decode_kernel`", decode, (128, 256, 4)),
    ("`decode_kernel`", decode, (2048, 256, 4)),
    ("`distortion_kernel`", distortion, (128, 256, 4)),
    ("`distortion_kernel`, again for backward", distortion_again, (128, 256, 4)),
    ("`joint_kernel`", joint, (128, 256, 4)),
    ("`joint_kernel`", joint, (2048, 256, 4)),
    ("`joint_kernel`, products for backward", products, (128, 256, 4)),
    ("`distortion_backward_kernel`", distortion_backward, (128, 256, 4)),
    ("`level_kernel`, all levels", level, (128, 1024, 4)),
    ("`level_backward_kernel`, all levels", level_backward, (128, 1024, 4)),
    ("`scatter_kernel`", scatter, (128, 256, 4)),
    ("`squared_errors_kernel`", squared, (128, 256, 4)),
    ("`squared_errors_backward_kernel`", squared_backward, (128, 256, 4)),
    ("`scatter_kernel`, of squared errors", scatter_pulls, (128, 256, 4)),
    ("`lookup_kernel`, a query", lookup, (128, 256, 4)),
    ("`queue_kernel`, one query, l2", queue, (128, 256, 4)),
    ("`select_kernel`, one query, l2, three passes", select, (128, 256, 4)),
]


def training_squared(D: int, K: int, M: int) -> list[Cost]:
    """Squared errors and their gradients: the kernels, then dx and the sum for the offset by torch."""
    kernels = (encode, squared, squared_backward, scatter_pulls)
    return [kernel(D, K, M) for kernel in kernels] + [Cost(bytes=12 * D)]


def training_paper(D: int, K: int, M: int) -> list[Cost]:
    """The paper's loss and its gradients: three products with the codebook, the kernels, Delta^T Delta for dG."""
    product = Cost(bytes=4 * D + 4 * K, torch=2 * K * D)
    sums = Cost(bytes=4 * K * M, torch=2 * K * K * M)
    kernels = (distortion, joint, distortion_again, products, distortion_backward, scatter)
    return [product] * 3 + [kernel(D, K, M) for kernel in kernels] + [sums]


def tables() -> str:
    """Markdown: every kernel, then a whole training step."""
    peaks = "; ".join(
        f"{name} {gpu.memory / 1e9:,.0f} GB/s, L2 {gpu.l2 / 1e9:,.0f} GB/s, "
        f"{gpu.float32 / 1e12:g} TFLOP/s float32, {gpu.tf32 / 1e12:g} TF32"
        for name, gpu in GPUS.items()
    )
    lines = [f"Peaks used: {peaks}. `fast` is tf32x3, a third of TF32.", ""]
    limits = " | ".join(f"{name}: fast / exact, bound by" for name in GPUS)
    lines += [
        f"| kernel | D, K, M | bytes | of L2 | product flops | other | {limits} |",
        "| --- " * (6 + len(GPUS)) + "|",
    ]
    for name, kernel, sizes in KERNELS:
        cost = kernel(*sizes)
        cells = [f"{speed([cost], gpu)}, {cost.limit(gpu, False)}" for gpu in GPUS.values()]
        counts = [
            f"{cost.bytes:,.0f}",
            f"{cost.bytes + cost.cached:,.0f}",
            f"{cost.inside:,.0f}",
            f"{cost.others:,.0f}",
        ]
        lines.append(f"| {' | '.join([name, ', '.join(map(str, sizes)), *counts, *cells])} |")
    lines += [
        "",
        "Speeds are in millions of vectors, or codes, a second. A whole training step, one kernel after the other:",
        "",
    ]
    names = " | ".join(f"{name}: fast / exact" for name in GPUS)
    lines += [f"| loss | D, K, M | {names} |", "| --- " * (2 + len(GPUS)) + "|"]
    for loss, training in (("squared", training_squared), ("paper", training_paper)):
        for sizes in ((128, 256, 4), (2048, 256, 4), (2048, 256, 8)):
            cells = [speed(training(*sizes), gpu) for gpu in GPUS.values()]
            lines.append(f"| {loss} | {', '.join(map(str, sizes))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speed(costs: list[Cost], gpu: GPU) -> str:
    """Millions of vectors a second at best, fast and exact."""
    return " / ".join(f"{1e-6 / sum(cost.seconds(gpu, exact) for cost in costs):,.0f}" for exact in (False, True))


if __name__ == "__main__":
    print(tables())
