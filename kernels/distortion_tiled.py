"""The training pass above 256 codewords: per level a tiled pass over the scores, with torch's products in between."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .levels import REBASE, TILE, LevelGradients, Levels, Scored, first_smallest, residual_norm, residual_scores

_ROWS = 16  # vectors per program


@triton.jit
def _soft_weight(t, r, after, b, k, K, s, diagonal, gamma):
    """exp(-gamma (d - d[b])) and d [ROWS, TILE] from scores t, r = r_m and after = r_{m+1}, the square of d[b]."""
    nearest = tl.sqrt(tl.maximum(after, 0.0))[:, None]  # perhaps of the vector itself; no other distance is less
    key = (s * s * diagonal)[None, :] - 2 * s * t
    distance = tl.maximum(tl.sqrt(tl.maximum(r[:, None] + key, 0.0)), nearest)
    distance = tl.where(k[None, :] == b[:, None], nearest, distance)
    return tl.where((k < K)[None, :], tl.exp(-gamma * (distance - nearest)), 0.0), distance


@triton.jit(do_not_specialize=["N", "m"])
def level_kernel(
    x,
    codebook,
    t,
    delta,
    norms,
    r,
    gram,
    diagonal,
    scale,
    gamma,
    codes,
    next_t,
    next_delta,
    next_r,
    inner,
    N,
    K,
    P,
    D,
    M,
    m,
    AGAIN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     one level: b_m, p_m, Delta_m, t_{m+1}, r_{m+1} and <Delta_m, t_{m+1}>, docs/math.md section 3. AGAIN:
              b_m is given
    Tiling:   one program owns ROWS vectors and loops three times over their P scores, TILE at a time
    Memory:   reads t [N, P] three times, twice from L2, and delta [N, P] once, writes t_{m+1} and Delta_m, possibly in
              place
    Numerics: float32, no FMA in the key, ties to the smaller index; where r < n / 256, t and r are recomputed from
              x - xhat
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    live = n < N
    s = tl.load(scale + m)
    sharpness = tl.load(gamma)
    norm = tl.load(norms + n, mask=live, other=0.0)
    squared = tl.load(r + n, mask=live, other=0.0)
    best = tl.full((ROWS,), float("inf"), dtype=tl.float32)
    b = tl.zeros((ROWS,), dtype=tl.int32)
    if AGAIN:
        b = tl.load(codes + n * M + m, mask=live, other=0).to(tl.int32)
        chosen = tl.load(t + n * P + b, mask=live, other=0.0)
        best = s * s * tl.load(diagonal + b) - 2 * s * chosen
    else:
        for start in range(0, P, TILE):
            k = start + tl.arange(0, TILE)  # [TILE]
            now = tl.load(t + n[:, None] * P + k[None, :], mask=live[:, None], other=0.0)  # [ROWS, TILE]
            key = tl.where(k < K, s * s * tl.load(diagonal + k), float("inf"))[None, :] - 2 * s * now
            tile_best, place = first_smallest(key, k, K)
            b = tl.where(tile_best < best, place, b)
            best = tl.where(tile_best < best, tile_best, best)
        tl.store(codes + n * M + m, b.to(tl.int64), mask=live)
        tl.debug_barrier()  # codes are visible to all threads of this program
    after = squared + best
    small = after < norm * REBASE
    rebase = tl.max(small.to(tl.int32), axis=0) > 0
    if rebase:
        fresh_r = residual_norm(x, codebook, scale, codes, n, live, D, M, m + 1, COLUMNS)
        after = tl.where(small, fresh_r, after)
    total = tl.zeros((ROWS,), dtype=tl.float32)  # of exp(-gamma (d - d[b]))
    for start in range(0, P, TILE):
        k = start + tl.arange(0, TILE)
        now = tl.load(t + n[:, None] * P + k[None, :], mask=live[:, None], other=0.0)
        weight, _distance = _soft_weight(now, squared, after, b, k, K, s, tl.load(diagonal + k), sharpness)
        total += tl.sum(weight, axis=1)
    product = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, P, TILE):
        k = start + tl.arange(0, TILE)
        here = n[:, None] * P + k[None, :]
        now = tl.load(t + here, mask=live[:, None], other=0.0)
        weight, _distance = _soft_weight(now, squared, after, b, k, K, s, tl.load(diagonal + k), sharpness)
        change = weight / total[:, None] - (k[None, :] == b[:, None]).to(tl.float32)
        sums = tl.load(delta + here, mask=live[:, None], other=0.0) + s * change
        now -= s * tl.load(gram + b[:, None].to(tl.int64) * P + k[None, :])
        if rebase:
            fresh, _fresh_r = residual_scores(
                x, x, codebook, scale, codes, n, n, live, k, K, D, M, m + 1, False, COLUMNS, PRECISION
            )
            now = tl.where(small[:, None], fresh, now)
        product += tl.sum(sums * now, axis=1)
        tl.store(next_t + here, now, mask=live[:, None])
        tl.store(next_delta + here, sums, mask=live[:, None])
    tl.store(next_r + n, after, mask=live)
    tl.store(inner + n, product, mask=live)


@triton.jit(do_not_specialize=["N", "m"])
def level_backward_kernel(
    t,
    next_t,
    delta,
    product,
    norms,
    r,
    next_r,
    gram,
    diagonal,
    scale,
    gamma,
    codes,
    alpha,
    kappa,
    eta,
    a,
    dt,
    rho,
    moved,
    ddiagonal,
    dscale,
    N,
    K,
    P,
    M,
    m,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Math:     one level of the recursion at the end of docs/math.md section 3
    Tiling:   one program owns ROWS vectors and loops twice over their P scores, TILE at a time
    Memory:   reads t_m, t_{m+1}, Delta_m and Delta_m G, updates a and dt, all [N, P], and rho [N]; writes -s_m
              dL/dt_{m+1} for scatter_kernel
    Numerics: float32; sums over the program's rows go to its own row of ddiagonal [programs, P] and dscale
              [programs, M], which are added in order: no atomics
    """
    program = tl.program_id(0).to(tl.int64)
    n = program * ROWS + tl.arange(0, ROWS)  # [ROWS]
    live = n < N
    s = tl.load(scale + m)
    sharpness = tl.load(gamma)
    b = tl.load(codes + n * M + m, mask=live, other=0).to(tl.int32)
    squared = tl.load(r + n, mask=live, other=0.0)
    after = tl.load(next_r + n, mask=live, other=0.0)
    left = tl.load(next_t + n * P + b, mask=live, other=0.0)  # t_m[b] - s G[b, b], which would cancel
    by_soft = tl.load(alpha + n * M + m, mask=live, other=0.0)
    by_joint = tl.load(kappa + n * M + m, mask=live, other=0.0)
    of_r = tl.load(rho + n, mask=live, other=0.0) + by_soft + tl.load(eta + n * M + m, mask=live, other=0.0)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    mean = tl.zeros((ROWS,), dtype=tl.float32)
    ds = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, P, TILE):
        k = start + tl.arange(0, TILE)  # [TILE]
        here = n[:, None] * P + k[None, :]
        hot = k[None, :] == b[:, None]
        of_delta = tl.load(a + here, mask=live[:, None], other=0.0)  # [ROWS, TILE]
        of_delta -= 2 * by_soft[:, None] * tl.load(next_t + here, mask=live[:, None], other=0.0)
        of_delta += 2 * by_joint[:, None] * tl.load(product + here, mask=live[:, None], other=0.0)
        tl.store(a + here, of_delta, mask=live[:, None])
        of_t = tl.load(dt + here, mask=live[:, None], other=0.0)
        of_t -= 2 * by_soft[:, None] * tl.load(delta + here, mask=live[:, None], other=0.0)
        tl.store(dt + here, of_t, mask=live[:, None])
        tl.store(moved + here, -s * of_t, mask=live[:, None])
        ds -= tl.sum(of_t * tl.load(gram + b[:, None].to(tl.int64) * P + k[None, :]), axis=1)
        ds -= tl.sum(tl.where(hot, of_delta, 0.0), axis=1)
        now = tl.load(t + here, mask=live[:, None], other=0.0)
        weight, _distance = _soft_weight(now, squared, after, b, k, K, s, tl.load(diagonal + k), sharpness)
        total += tl.sum(weight, axis=1)
        mean += tl.sum(weight * of_delta, axis=1)
    mean /= total
    ds += mean
    tl.debug_barrier()  # a and dt are visible to all threads of this program
    near = tl.sqrt(tl.load(norms + n, mask=live, other=0.0) * NOISE)
    of_before = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, P, TILE):
        k = start + tl.arange(0, TILE)
        here = n[:, None] * P + k[None, :]
        now = tl.load(t + here, mask=live[:, None], other=0.0)
        diag = tl.load(diagonal + k)
        hot = k[None, :] == b[:, None]
        weight, distance = _soft_weight(now, squared, after, b, k, K, s, diag, sharpness)
        of_delta = tl.load(a + here, mask=live[:, None], other=0.0)
        far = (distance > near[:, None]) & (k < K)[None, :]
        slope = weight / total[:, None] * (of_delta - mean[:, None]) / tl.where(far, distance, 1.0)
        q = tl.where(far, -0.5 * sharpness * s * slope, 0.0) + tl.where(hot, of_r[:, None], 0.0)
        q = tl.where(live[:, None], q, 0.0)
        ds += 2 * tl.sum(q * tl.where(hot, -left[:, None], s * diag[None, :] - now), axis=1)
        of_before += tl.sum(q, axis=1)
        of_diagonal = tl.load(ddiagonal + program * P + k) + s * s * tl.sum(q, axis=0)
        tl.store(ddiagonal + program * P + k, of_diagonal)
        of_t = tl.load(dt + here, mask=live[:, None], other=0.0)
        tl.store(dt + here, of_t - 2 * s * q, mask=live[:, None])
    tl.store(rho + n, of_before, mask=live)
    tl.store(dscale + program * M + m, tl.sum(tl.where(live, ds, 0.0), axis=0))


def levels_tiled(
    h: Tensor, codec: Scored, scores: Tensor, norms: Tensor, gamma: Tensor, precision: str, errors: bool = True
) -> tuple[Levels, Tensor]:
    """`distortion.run_levels` above 256 codewords."""
    (N, M), P = (len(h), len(codec.scale)), codec.P
    residuals, soft, joint = (torch.empty(N, M, dtype=torch.float32, device=h.device) for _ in range(3))
    codes = torch.empty(N, M, dtype=torch.int64, device=h.device)
    t, delta = scores.clone(), torch.zeros(N, P, dtype=torch.float32, device=h.device)
    r, inner = norms.clone(), torch.empty_like(norms)
    for m in range(M):
        _run_level(h, codec, t, delta, norms, r, gamma, codes, t, delta, r, inner, m, precision, again=False)
        residuals[:, m] = r
        if errors:
            joint[:, m] = (delta * (delta @ codec.gram)).sum(dim=1)
            soft[:, m] = r - 2 * inner + joint[:, m]
    return Levels(codes, residuals, soft, joint), delta


def gradients_tiled(
    h: Tensor,
    codec: Scored,
    scores: Tensor,
    norms: Tensor,
    gamma: Tensor,
    codes: Tensor,
    alpha: Tensor,
    kappa: Tensor,
    eta: Tensor,
    noise: float,
    precision: str,
    ddelta: Tensor | None = None,
) -> LevelGradients:
    """The recursion over all levels from alpha, kappa and eta [N, M] and dL/dDelta [N, P] after the last one."""
    (N, M), P = codes.shape, codec.P
    t, r = scores.new_empty(M + 1, N, P), [norms, *(torch.empty_like(norms) for _ in range(M))]
    deltas, inner = scores.new_zeros(M + 1, N, P), torch.empty_like(norms)  # the first is Delta before level 0
    t[0] = scores
    for m in range(M):
        after = (t[m + 1], deltas[m + 1], r[m + 1], inner)
        _run_level(h, codec, t[m], deltas[m], norms, r[m], gamma, codes, *after, m, precision, again=True)
    products = deltas[1:] @ codec.gram if ddelta is None else deltas[1:]  # with ddelta kappa is 0
    programs = triton.cdiv(N, _ROWS)
    a = torch.zeros_like(scores) if ddelta is None else ddelta.clone()
    dt, rho = torch.zeros_like(scores), torch.zeros_like(norms)
    ddiagonal, dscale = scores.new_zeros(programs, P), scores.new_empty(programs, M)
    moved = torch.empty_like(products)
    for m in reversed(range(M)):
        level_backward_kernel[(programs,)](
            t[m],
            t[m + 1],
            deltas[m + 1],
            products[m],
            norms,
            r[m],
            r[m + 1],
            codec.gram,
            codec.diagonal,
            codec.scale,
            gamma,
            codes,
            alpha,
            kappa,
            eta,
            a,
            dt,
            rho,
            moved[m],
            ddiagonal,
            dscale,
            N,
            codec.K,
            P,
            M,
            m,
            NOISE=noise,
            **settings(),
        )
    lines = deltas[1:].reshape(-1, P)
    return LevelGradients(
        lines, kappa.T.reshape(-1), moved.view(-1, P), codes.T.reshape(-1), dt, rho, ddiagonal, dscale
    )


def _run_level(
    h: Tensor,
    codec: Scored,
    t: Tensor,
    delta: Tensor,
    norms: Tensor,
    r: Tensor,
    gamma: Tensor,
    codes: Tensor,
    next_t: Tensor,
    next_delta: Tensor,
    next_r: Tensor,
    inner: Tensor,
    m: int,
    precision: str,
    *,
    again: bool,
) -> None:
    level_kernel[(triton.cdiv(len(h), _ROWS),)](
        h,
        codec.codebook,
        t,
        delta,
        norms,
        r,
        codec.gram,
        codec.diagonal,
        codec.scale,
        gamma,
        codes,
        next_t,
        next_delta,
        next_r,
        inner,
        len(h),
        codec.K,
        codec.P,
        h.shape[1],
        len(codec.scale),
        m,
        AGAIN=again,
        PRECISION=precision,
        COLUMNS=16,
        **settings(),
    )


def settings() -> dict[str, Any]:
    """Compile-time settings of both kernels."""
    return {"ROWS": _ROWS, "TILE": TILE, "num_warps": 8, "num_stages": 2, "maxnreg": 128, "enable_fp_fusion": False}
