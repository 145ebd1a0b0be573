"""The training pass up to 256 codewords: one kernel for the errors of all levels, another for their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .distortion_tiled import gradients_tiled, levels_tiled
from .joint import times_gram
from .levels import (
    MAX_ON_CHIP,
    MAX_SCORES,
    REBASE,
    TILE,
    LevelGradients,
    Levels,
    Scored,
    first_smallest,
    power_of_2,
    residual_scores,
)
from .totals import Gradients, Totals

NOISE = 2.0**-36  # relative to ||x||^2; a smaller squared distance is rounding error, and its gradient is 0
_ROWS = 16  # vectors per program


@triton.jit
def _rebase(
    x,
    codebook,
    scale,
    codes,
    out,
    n,
    live,
    K,
    D,
    M,
    levels,
    KP: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Recomputes the residual after some levels: writes its scores [ROWS, KP] to out[n] and returns r [ROWS]."""
    r = tl.zeros((n.shape[0],), dtype=tl.float32)
    for first in range(0, KP, TILE):
        k = first + tl.arange(0, TILE)
        t, r = residual_scores(x, x, codebook, scale, codes, n, n, live, k, K, D, M, levels, False, COLUMNS, PRECISION)
        tl.store(out + n[:, None] * KP + k[None, :], t, mask=live[:, None])
    return r


@triton.jit
def _soft_choice(t, r, after, hot, k, s, diagonal, gamma, inside):
    """p = softmax(-gamma d) [ROWS, KP] and d from scores t, r = r_m and after = r_{m+1}, the square of d[b]."""
    nearest = tl.sqrt(tl.maximum(after, 0.0))[:, None]  # perhaps of the vector itself; no other distance is less
    key = (s * s * tl.load(diagonal + k))[None, :] - 2 * s * t
    distance = tl.where(hot, nearest, tl.maximum(tl.sqrt(tl.maximum(r[:, None] + key, 0.0)), nearest))
    weight = tl.where(inside[None, :], tl.exp(-gamma * (distance - nearest)), 0.0)
    return weight / tl.sum(weight, axis=1)[:, None], distance


@triton.jit(do_not_specialize=["N"])
def distortion_kernel(
    x,
    codebook,
    scores,
    norms,
    gram,
    diagonal,
    scale,
    gamma,
    delta,
    left,
    scratch,
    codes,
    residuals,
    soft,
    N,
    K,
    D,
    M,
    AGAIN: tl.constexpr,
    EVERY: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KP: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     b_m, p_m, r_{m+1}, Delta_m and r_{m+1} - 2 <Delta_m, t_{m+1}>, the part of (E_s^m)^2 without J_m,
              docs/math.md section 3. AGAIN: codes are given, and only Delta_m and t_{m+1} are computed. Without EVERY:
              only codes, r_{m+1} and the last Delta
    Tiling:   one program owns ROWS vectors, all their scores and all M levels
    Memory:   reads the scores once and a row of G per level (from L2); threads exchange recomputed rows through scratch
              [N, KP]; writes codes, two numbers per level and delta [N, M, KP], or [N, KP] without EVERY. AGAIN: writes
              delta and left [N, M, KP]
    Numerics: float32, no FMA in the key, ties to the smaller index; where r < n / 256, t and r are recomputed from
              x - xhat
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    x, scores, norms, scratch = x + first * D, scores + first * KP, norms + first, scratch + first * KP
    codes, residuals, soft = codes + first * M, residuals + first * M, soft + first * M
    delta, left = delta + first * (M if EVERY else 1) * KP, left + first * M * KP
    n = tl.arange(0, ROWS)  # [ROWS], from the first of this program
    k = tl.arange(0, KP)  # [KP]
    live, inside = n < N - first, k < K
    sharpness = tl.load(gamma)
    norm = tl.load(norms + n, mask=live, other=0.0)
    t = tl.load(scores + n[:, None] * KP + k[None, :], mask=live[:, None], other=0.0)  # [ROWS, KP]
    total = tl.zeros((ROWS, KP), dtype=tl.float32)  # Delta
    r = norm
    for m in range(M):
        s = tl.load(scale + m)
        key = tl.where(inside, s * s * tl.load(diagonal + k), float("inf"))[None, :] - 2 * s * t
        if AGAIN:
            b = tl.load(codes + n * M + m, mask=live, other=0).to(tl.int32)
            best = tl.sum(tl.where(k[None, :] == b[:, None], key, 0.0), axis=1)
        else:
            best, b = first_smallest(key, k, K)
            tl.store(codes + n * M + m, b.to(tl.int64), mask=live)
            tl.debug_barrier()  # codes are visible to all threads of this program
        hot = k[None, :] == b[:, None]
        after = r + best
        small = after < norm * REBASE
        rebase = tl.max(small.to(tl.int32), axis=0) > 0
        if rebase:
            fresh_r = _rebase(x, codebook, scale, codes, scratch, n, live, K, D, M, m + 1, KP, TILE, COLUMNS, PRECISION)
            after = tl.where(small, fresh_r, after)
        p, _ = _soft_choice(t, r, after, hot, k, s, diagonal, sharpness, inside)
        total += s * (p - hot.to(tl.float32))
        if EVERY:
            tl.store(delta + (n * M + m)[:, None] * KP + k[None, :], total, mask=live[:, None])
        r = after
        t -= s * tl.load(gram + b[:, None] * KP + k[None, :])
        if rebase:
            tl.debug_barrier()  # recomputed scores are visible to all threads of this program
            fresh = tl.load(scratch + n[:, None] * KP + k[None, :], mask=live[:, None], other=0.0)
            t = tl.where(small[:, None], fresh, t)
        if AGAIN:
            tl.store(left + (n * M + m)[:, None] * KP + k[None, :], t, mask=live[:, None])
        else:
            tl.store(residuals + n * M + m, r, mask=live)
            if EVERY:
                tl.store(soft + n * M + m, r - 2 * tl.sum(total * t, axis=1), mask=live)
        tl.debug_barrier()  # all threads have read the codes and the recomputed scores of this level
    if not EVERY:
        tl.store(delta + n[:, None] * KP + k[None, :], total, mask=live[:, None])


@triton.jit
def _residual_at(residuals, norm, n, live, M, m):
    """r_m [ROWS], the squared residual before level m."""
    before = tl.load(residuals + tl.maximum(n * M + m - 1, 0), mask=live, other=0.0)
    return tl.where(m > 0, before, norm)


@triton.jit(do_not_specialize=["N"])
def distortion_backward_kernel(
    scores,
    norms,
    gram,
    diagonal,
    scale,
    gamma,
    codes,
    residuals,
    alpha,
    kappa,
    eta,
    deltas,
    left,
    moved,
    dscores,
    dnorms,
    ddiagonal,
    dscale,
    N,
    K,
    M,
    NOISE: tl.constexpr,
    ERRORS: tl.constexpr,
    ROWS: tl.constexpr,
    KP: tl.constexpr,
):
    """Math:     the recursion at the end of docs/math.md section 3; alpha, kappa and eta [N, M] are dL/d(E_s^m)^2, that
              plus dL/dJ_m, and dL/dr_{m+1}. Without ERRORS they are 0, and dscores holds dL/dDelta_{M-1} at first
    Tiling:   one program owns ROWS vectors, all their scores and all M levels, from the last to the first
    Memory:   reads scores t_0, t_{m+1} of all levels from left [N, M, KP], deltas [N, M, KP] and a row of G per level
              (from L2); replaces Delta_m G in moved [N, M, KP] by -s_m dL/dt_{m+1}, for scatter_kernel; writes
              dscores and dnorms
    Numerics: float32; sums over the program's rows go to its own row of ddiagonal [programs, KP] and dscale
              [programs, M], which are added in order: no atomics
    """
    program = tl.program_id(0).to(tl.int64)
    first = program * ROWS
    scores, norms, dnorms = scores + first * KP, norms + first, dnorms + first
    codes, residuals, alpha = codes + first * M, residuals + first * M, alpha + first * M
    kappa, eta, dscores = kappa + first * M, eta + first * M, dscores + first * KP
    deltas, left, moved = deltas + first * M * KP, left + first * M * KP, moved + first * M * KP
    n = tl.arange(0, ROWS)  # [ROWS], from the first of this program
    k = tl.arange(0, KP)  # [KP]
    live, inside = n < N - first, k < K
    sharpness = tl.load(gamma)
    norm = tl.load(norms + n, mask=live, other=0.0)

    a = tl.zeros((ROWS, KP), dtype=tl.float32)  # dL/dDelta
    if not ERRORS:
        a = tl.load(dscores + n[:, None] * KP + k[None, :], mask=live[:, None], other=0.0)
    after = _residual_at(residuals, norm, n, live, M, M)  # r_{m+1}
    t = tl.load(left + (n * M + M - 1)[:, None] * KP + k[None, :], mask=live[:, None], other=0.0)  # [ROWS, KP], t_{m+1}
    dt = tl.zeros((ROWS, KP), dtype=tl.float32)
    rho = tl.zeros((ROWS,), dtype=tl.float32)  # dL/dr
    of_diagonal = tl.zeros((KP,), dtype=tl.float32)
    for up in range(M):
        m = M - 1 - up
        s = tl.load(scale + m)
        here = (n * M + m)[:, None] * KP + k[None, :]
        if ERRORS:
            by_soft = tl.load(alpha + n * M + m, mask=live, other=0.0)
            a -= 2 * by_soft[:, None] * t  # t_{m+1}
            product = tl.load(moved + here, mask=live[:, None], other=0.0)
            a += 2 * tl.load(kappa + n * M + m, mask=live, other=0.0)[:, None] * product
            dt -= 2 * by_soft[:, None] * tl.load(deltas + here, mask=live[:, None], other=0.0)
            rho += by_soft + tl.load(eta + n * M + m, mask=live, other=0.0)
        tl.debug_barrier()  # all threads have read the product
        tl.store(moved + here, -s * dt, mask=live[:, None])
        b = tl.load(codes + n * M + m, mask=live, other=0).to(tl.int32)
        hot = k[None, :] == b[:, None]
        ds = -tl.sum(dt * tl.load(gram + b[:, None] * KP + k[None, :]), axis=1)
        nearest = tl.sum(tl.where(hot, t, 0.0), axis=1)  # t_{m+1}[b] = t_m[b] - s G[b, b], which would cancel

        r = _residual_at(residuals, norm, n, live, M, m)
        before = scores + n[:, None] * KP + k[None, :]
        if m > 0:
            before = left + (n * M + m - 1)[:, None] * KP + k[None, :]
        t = tl.load(before, mask=live[:, None], other=0.0)
        p, distance = _soft_choice(t, r, after, hot, k, s, diagonal, sharpness, inside)
        after = r
        mean = tl.sum(p * a, axis=1)
        ds += tl.sum((p - hot.to(tl.float32)) * a, axis=1)
        far = (distance > tl.sqrt(norm * NOISE)[:, None]) & inside[None, :]
        q = tl.where(far, -0.5 * sharpness * s * p * (a - mean[:, None]) / tl.where(far, distance, 1.0), 0.0)
        q += tl.where(hot, rho[:, None], 0.0)
        ds += 2 * tl.sum(q * tl.where(hot, -nearest[:, None], (s * tl.load(diagonal + k))[None, :] - t), axis=1)
        tl.store(dscale + program * M + m, tl.sum(tl.where(live, ds, 0.0), axis=0))
        of_diagonal += s * s * tl.sum(tl.where(live[:, None], q, 0.0), axis=0)
        dt -= 2 * s * q
        rho = tl.sum(q, axis=1)
    tl.store(dscores + n[:, None] * KP + k[None, :], dt, mask=live[:, None])
    tl.store(dnorms + n, rho, mask=live)
    tl.store(ddiagonal + program * KP + k, of_diagonal)


def codec_of(codebook: Tensor, scale: Tensor) -> Scored:
    """The codec for both passes, padded."""
    return Scored(codebook, scale, padded_codewords(len(codebook)))


def padded_codewords(K: int) -> int:
    """P: a power of 2 up to MAX_ON_CHIP codewords, full tiles above."""
    return power_of_2(K) if K <= MAX_ON_CHIP else triton.cdiv(K, TILE) * TILE


def distortion(h: Tensor, codec: Scored, scores: Tensor, gamma: Tensor, precision: str = "tf32x3") -> Levels:
    """All levels of centred h [N, D] from scores [N, P] and gamma [1]."""
    norms = h.square().sum(dim=1)
    compute = run_levels if codec.P <= MAX_ON_CHIP else levels_tiled
    width = codec.P * (len(codec.scale) if codec.P <= MAX_ON_CHIP else 1)
    found = [compute(h[r], codec, scores[r], norms[r], gamma, precision)[0] for r in parts(len(h), width)]
    return Levels(*(joined(columns) for columns in zip(*found, strict=True)))


def distortion_backward(
    h: Tensor,
    codec: Scored,
    scores: Tensor,
    gamma: Tensor,
    levels: Levels,
    dhard: Tensor,
    dsoft: Tensor,
    djoint: Tensor,
    precision: str = "tf32x3",
) -> Gradients:
    """Gradients from those of hard = sqrt(residuals), soft = sqrt(soft) and joint, [N, M] each."""
    M, norms = len(codec.scale), h.square().sum(dim=1)
    noise = (NOISE * norms)[:, None]
    alpha = dsoft * _half_over_root(levels.soft, noise)
    eta = dhard * _half_over_root(levels.residuals, noise)
    kappa = alpha + djoint
    totals = Totals(h, codec)
    for rows in parts(len(h), M * codec.P):
        inputs = (h[rows], codec, scores[rows], norms[rows], gamma)
        upstream = (alpha[rows], kappa[rows], eta[rows])
        if codec.P <= MAX_ON_CHIP:
            found = gradients(*inputs, Levels(*(column[rows] for column in levels)), upstream, precision)
        else:
            found = gradients_tiled(*inputs, levels.codes[rows], *upstream, NOISE, precision)
        totals.add(rows, found)
        totals.dgram.addmm_((found.deltas * found.kappa[:, None]).T, found.deltas)
    return totals.gradients()


def run_levels(
    h: Tensor, codec: Scored, scores: Tensor, norms: Tensor, gamma: Tensor, precision: str, errors: bool = True
) -> tuple[Levels, Tensor]:
    """The levels and Delta after every level [N, M, P]; without `errors` that after the last one [N, P], and soft and
    joint errors are not computed."""
    N, M = len(h), len(codec.scale)
    numbers = (h.new_empty(N, M) for _ in range(3))
    levels = Levels(torch.empty(N, M, dtype=torch.int64, device=h.device), *numbers)
    delta = h.new_empty(N, M, codec.P) if errors else h.new_empty(N, codec.P)
    outputs = delta, delta, torch.empty_like(scores)  # t_{m+1} is not written
    _launch_levels(h, codec, scores, norms, gamma, outputs, levels, precision, {"AGAIN": False, "EVERY": errors})
    if errors:
        times_gram(delta, codec, levels, delta, precision, keep=False)
    return levels, delta


def gradients(
    h: Tensor,
    codec: Scored,
    scores: Tensor,
    norms: Tensor,
    gamma: Tensor,
    levels: Levels,
    upstream: tuple[Tensor, Tensor, Tensor] | Tensor,
    precision: str,
) -> LevelGradients:
    """The recursion over all levels from alpha, kappa and eta [N, M], or from dL/dDelta [N, P] after the last one."""
    (N, M), P = levels.codes.shape, codec.P
    errors = not isinstance(upstream, Tensor)
    alpha, kappa, eta = (upstream,) * 3 if isinstance(upstream, Tensor) else upstream
    dscores = torch.empty_like(scores) if errors else alpha.clone()
    dnorms = torch.empty_like(norms)
    deltas, left, moved = h.new_empty(3, N * M, P)
    flags = {"AGAIN": True, "EVERY": errors}
    _launch_levels(h, codec, scores, norms, gamma, (deltas, left, moved), levels, precision, flags)
    if errors:
        times_gram(deltas, codec, levels, moved, precision, keep=True)
    programs = triton.cdiv(N, _ROWS)
    ddiagonal, dscale = h.new_empty(programs, P), h.new_empty(programs, M)
    distortion_backward_kernel[(programs,)](
        scores,
        norms,
        codec.gram,
        codec.diagonal,
        codec.scale,
        gamma,
        levels.codes,
        levels.residuals,
        alpha,
        kappa,
        eta,
        deltas,
        left,
        moved,
        dscores,
        dnorms,
        ddiagonal,
        dscale,
        N,
        codec.K,
        M,
        NOISE=NOISE,
        ERRORS=errors,
        **backward_settings(P),
    )
    lines = (deltas, kappa.reshape(-1), moved, levels.codes.reshape(-1))
    return LevelGradients(*lines, dscores, dnorms, ddiagonal, dscale)


def _launch_levels(
    h: Tensor,
    codec: Scored,
    scores: Tensor,
    norms: Tensor,
    gamma: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    levels: Levels,
    precision: str,
    flags: dict[str, bool],
) -> None:
    """Writes the levels, and outputs: delta, left, and a scratch [N, P] at least."""
    distortion_kernel[(triton.cdiv(len(h), _ROWS),)](
        h,
        codec.codebook,
        scores,
        norms,
        codec.gram,
        codec.diagonal,
        codec.scale,
        gamma,
        *outputs,
        levels.codes,
        levels.residuals,
        levels.soft,
        len(h),
        codec.K,
        h.shape[1],
        len(codec.scale),
        **flags,
        **settings(codec.P, precision, flags["AGAIN"]),
    )


def settings(P: int, precision: str, again: bool = False) -> dict[str, Any]:
    """Compile-time settings of distortion_kernel for P codewords: 16 scores a thread; 8 with AGAIN, which would spill.

    TILE and COLUMNS are those of recomputed scores.
    """
    tiling = {"PRECISION": precision, "ROWS": _ROWS, "KP": P, "TILE": min(32, P), "COLUMNS": 16}
    return tiling | {
        "num_warps": max(4, P // (16 if again else 32)),
        "num_stages": 2,
        "maxnreg": 128,
        "enable_fp_fusion": False,
    }


def backward_settings(P: int) -> dict[str, Any]:
    """Compile-time settings of distortion_backward_kernel: 8 scores a thread."""
    compiler = {"num_warps": max(4, P // 16), "num_stages": 2, "maxnreg": 128, "enable_fp_fusion": False}
    return {"ROWS": _ROWS, "KP": P, **compiler}


def parts(N: int, width: int) -> Iterator[slice]:
    """Slices of 0..N with at most MAX_SCORES numbers each, at `width` numbers per row."""
    step = max(_ROWS, MAX_SCORES // width)
    return (slice(first, min(first + step, N)) for first in range(0, max(N, 1), step))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after the other, not copied if there is one only."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _half_over_root(squared: Tensor, noise: Tensor) -> Tensor:
    """The derivative of the square root; 0 where `squared` is only rounding error."""
    return 0.5 * torch.where(squared > noise, squared, torch.inf).rsqrt()
