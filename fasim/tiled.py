"""FlashAttention as loops over tiles: the text to read first.

Standard attention builds S = Q Kᵀ, P = softmax(S) and O = P V whole; S and P have n² entries and
travel through slow memory (HBM) several times. FlashAttention works on tiles that fit in fast
memory (SRAM) and never writes S or P. The difficulty is softmax, which wants the maximum of a
whole row: online softmax corrects what it has when a larger value turns up.

    n_q, n_k    queries, keys              d, d_v      head_dim of Q and K, of V
    B_r         rows of a Q tile (block_q)       T_r   number of Q tiles, ceil(n_q / B_r)
    B_c         rows of a K/V tile (block_kv)    T_c   number of K/V tiles, ceil(n_k / B_c)
    S, P        scores of a tile, and exp(S - m)
    m, l        running maximum and sum of exp(S - m) of each row
    O, lse      output, and natural-log sum of exp(S) of each row: m + log l

Everything is one head: Q (n_q, d), K (n_k, d), V (n_k, d_v), floats, worked on in Q's precision.
``causal`` hides key k from query q when k > q + n_k - n_q: the last key is aligned with the last
query. ``scale`` defaults to 1/√d. The last tile may be short; lengths may be 0. Sources: Dao et al.
2022 (V1), Dao 2023 (V2), Shah et al. 2024 (V3).
"""

# ruff: noqa: E741  (the papers' own letters)
from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def online_softmax(S: Array, m: Array, l: Array) -> tuple[Array, Array, Array, Array]:
    """Take in a tile of scores: (P, alpha, m, l), the last two updated.

    What was summed up so far was relative to the old maximum; multiplying it by alpha makes it
    relative to the new one. One row that shows 90, 80, 70 and then 95:

    >>> m, l = np.array([-np.inf]), np.array([0.0])
    >>> P, alpha, m, l = online_softmax(np.array([[90.0, 80.0, 70.0]]), m, l)
    >>> float(m[0]), float(round(l[0], 6))
    (90.0, 1.000045)
    >>> P, alpha, m, l = online_softmax(np.array([[95.0]]), m, l)
    >>> float(m[0]), bool(alpha[0] == np.exp(90.0 - 95.0))
    (95.0, True)
    >>> scores = np.array([90.0, 80.0, 70.0, 95.0])
    >>> bool(np.isclose(l[0], np.exp(scores - 95.0).sum(), rtol=1e-15))
    True
    """
    m_new = np.maximum(m, S.max(axis=1, initial=-np.inf))
    base = _or(m_new, -np.inf, 0)  # a row that has seen no key: -inf - -inf would be NaN
    P = np.exp(S - base[:, None])
    alpha = np.exp(m - base)
    return P, alpha, m_new, alpha * l + P.sum(axis=1)


def flash_attention_v1(Q: Array, K: Array, V: Array, block_size: int = 32) -> Array:
    """O by FlashAttention V1, in the loop order of the paper: K/V tiles outside, Q tiles inside.

    The demo that circulates under this name has Q outside and K/V inside and divides once at the
    end: that is V2's order, here ``flash_attention_v2``.
    """
    return v1(Q, K, V, block_size, block_size)[0]


def flash_attention_v2(Q: Array, K: Array, V: Array, block_size: int = 32) -> Array:
    """O by FlashAttention V2: Q tiles outside, K/V tiles inside, one division at the end."""
    return v2(Q, K, V, block_size, block_size)[0]


def flash_attention_v3(Q: Array, K: Array, V: Array, block_size: int = 32) -> Array:
    """O by FlashAttention V3: V2 fed by a producer, last K/V tile first."""
    return v3(Q, K, V, block_size, block_size)[0]


def v1(
    Q: Array,
    K: Array,
    V: Array,
    block_q: int = 32,
    block_kv: int = 32,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """(O, lse) by Algorithm 1 of the V1 paper.

    Each K/V tile is loaded once, and every Q tile passes by it. So O, m and l of every row live in
    HBM and are read and written in each of the T_c outer steps; O is normalised every time.
    """
    O, m, l = _start(len(Q), V.shape[1], Q.dtype)
    shift = _shift(Q, K, causal)
    for k in tiles(len(K), block_kv):
        K_j, V_j = K[k], V[k]  # HBM to SRAM, once
        for q in tiles(len(Q), block_q):
            if unseen(q, k, shift):
                continue
            S = _scores(Q[q], K_j, scale)
            _mask(S, q, k, shift)
            O_i, m_i, l_i = O[q], m[q], l[q]  # HBM to SRAM, T_c times
            P, alpha, m[q], l_new = online_softmax(S, m_i, l_i)
            O[q] = ((alpha * l_i)[:, None] * O_i + P @ V_j) / _or(l_new, 0, 1)[:, None]
            l[q] = l_new
    return O, _lse(m, l)


def v2(
    Q: Array,
    K: Array,
    V: Array,
    block_q: int = 32,
    block_kv: int = 32,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """(O, lse) by Algorithm 1 of the V2 paper.

    The loops change places: a Q tile keeps its O, m and l in registers while all K/V tiles pass
    by, so nothing but the result is written and each Q tile is a thread block of its own. O stays
    un-normalised until the end.
    """
    O, lse = np.empty((len(Q), V.shape[1]), Q.dtype), np.empty(len(Q), Q.dtype)
    shift = _shift(Q, K, causal)
    for q in tiles(len(Q), block_q):  # in parallel
        O_i, m, l = _start(len(Q[q]), V.shape[1], Q.dtype)  # registers
        for k in tiles(len(K), block_kv):
            if unseen(q, k, shift):
                break  # and so are all later keys
            S = _scores(Q[q], K[k], scale)
            _mask(S, q, k, shift)
            P, alpha, m, l = online_softmax(S, m, l)
            O_i = alpha[:, None] * O_i + P @ V[k]
        O[q], lse[q] = O_i / _or(l, 0, 1)[:, None], _lse(m, l)
    return O, lse


class Scales(NamedTuple):
    """FP8 scales, one a tile: q (T_r,), k and v (T_c,). Real values are stored * scale."""

    q: Array
    k: Array
    v: Array


def v3(
    Q: Array,
    K: Array,
    V: Array,
    block_q: int = 32,
    block_kv: int = 32,
    causal: bool = False,
    scale: float | None = None,
    scales: Scales | None = None,
) -> tuple[Array, Array]:
    """(O, lse) by the V3 paper: V2 with a producer that loads ahead, keys descending.

    Descending, so that the masked tiles come first and the loop needs no mask after them; the
    Q tile with the most keys first, so that none is left over at the end. With ``scales`` Q, K and
    V hold e4m3 (see ``quantise``) and results are fp32.
    """
    dtype = Q.dtype if scales is None else np.dtype(np.float32)
    O, lse = np.empty((len(Q), V.shape[1]), dtype), np.empty(len(Q), dtype)
    shift = _shift(Q, K, causal)
    for i, q in reversed(list(enumerate(tiles(len(Q), block_q)))):  # persistent blocks
        O_i, m, l = _start(len(Q[q]), V.shape[1], dtype)
        steps = [(j, k) for j, k in enumerate(tiles(len(K), block_kv)) if not unseen(q, k, shift)]
        for (j, k), K_j, V_j in producer(K, V, reversed(steps)):  # the consumer
            S = _scores(Q[q], K_j, scale)
            if scales is not None:
                S *= scales.q[i] * scales.k[j]
            _mask(S, q, k, shift)
            P, alpha, m, l = online_softmax(S, m, l)
            T = P @ V_j if scales is None else _product_e4m3(P, V_j) * scales.v[j]
            O_i = alpha[:, None] * O_i + T
        O[q], lse[q] = O_i / _or(l, 0, 1)[:, None], _lse(m, l)
    return O, lse


Step = tuple[int, slice]


def producer(
    K: Array, V: Array, steps: Iterable[Step], stages: int = 2
) -> Iterator[tuple[Step, Array, Array]]:
    """Copies K/V tiles into a ring of ``stages`` buffers, ahead of the consumer.

    On the GPU this is a warp of its own, and both sides wait on barriers: the producer until a
    buffer is empty, the consumer until one is full. Here ``yield`` hands over a full buffer, and
    being asked for the next one says that it is empty again.
    """
    ring: deque[tuple[Step, Array, Array]] = deque()
    for step in steps:
        if len(ring) == stages:
            yield ring.popleft()
        ring.append((step, K[step[1]].copy(), V[step[1]].copy()))
    while ring:
        yield ring.popleft()


def backward(
    Q: Array,
    K: Array,
    V: Array,
    O: Array,
    lse: Array,
    dO: Array,
    block_q: int = 32,
    block_kv: int = 32,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    """(dQ, dK, dV), recomputing S and P tile by tile from lse instead of having stored them.

    A K/V tile keeps its dK and dV while the Q tiles pass by; dQ is summed in HBM. With
    D = rowsum(dO * O), the gradient of softmax is dS = P * (dP - D).
    """
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    shift = _shift(Q, K, causal)
    D = (dO * O).sum(axis=1)
    base = _or(lse, -np.inf, 0)
    for k in tiles(len(K), block_kv):  # in parallel
        for q in tiles(len(Q), block_q):
            if unseen(q, k, shift):
                continue
            S = _scores(Q[q], K[k], scale)
            _mask(S, q, k, shift)
            P = np.exp(S - base[q, None])  # already normalised
            dP = dO[q] @ V[k].T
            dS = P * (dP - D[q, None]) * _scale(Q, scale)
            dV[k] += P.T @ dO[q]
            dK[k] += dS.T @ Q[q]
            dQ[q] += dS @ K[k]  # read-modify-write in HBM, or an atomic add
    return dQ, dK, dV


def quantise(X: Array, block_size: int) -> tuple[Array, Array]:
    """X (n, d) as e4m3, and the scale of each tile of ``block_size`` rows (n: one for all).

    The largest entry of a tile becomes 448, the largest e4m3 number.
    """
    stored = np.empty(X.shape, ml_dtypes.float8_e4m3fn)
    scales = np.ones(math.ceil(len(X) / block_size), np.float32)
    for j, x in enumerate(tiles(len(X), block_size)):
        scales[j] = max(np.abs(X[x]).max() / 448, np.finfo(np.float32).tiny)
        stored[x] = X[x] / scales[j]
    return stored, scales


def tiles(n: int, size: int) -> list[slice]:
    """Row ranges of the tiles of ``n`` rows, the last one short if need be.

    >>> tiles(70, 32)
    [slice(0, 32, None), slice(32, 64, None), slice(64, 70, None)]
    """
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _start(rows: int, d_v: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """O, m and l before the first key."""
    return np.zeros((rows, d_v), dtype), np.full(rows, -np.inf, dtype), np.zeros(rows, dtype)


def _scores(Q_i: Array, K_j: Array, scale: float | None) -> Array:
    """scale * Q_i K_jᵀ; e4m3 tiles accumulate in fp32."""
    q, k = (x.astype(np.float32) if x.itemsize == 1 else x for x in (Q_i, K_j))
    return q @ k.T * _scale(Q_i, scale)


def _scale(Q: Array, scale: float | None) -> float:
    return 1 / math.sqrt(Q.shape[1]) if scale is None else scale


def _shift(Q: Array, K: Array, causal: bool) -> int:
    """Row q sees the keys up to q + shift: bottom-right alignment, or all of them."""
    return len(K) - len(Q) if causal else len(K)


def unseen(q: slice, k: slice, shift: int) -> bool:
    """Whether no row of tile ``q`` sees a key of tile ``k``."""
    return bool(k.start > q.stop - 1 + shift)


def _mask(S: Array, q: slice, k: slice, shift: int) -> None:
    """Sets the scores of hidden keys to -inf."""
    row, key = np.arange(q.start, q.stop), np.arange(k.start, k.stop)
    S[key > row[:, None] + shift] = -np.inf


def _product_e4m3(P: Array, V_j: Array) -> Array:
    """P V_j with P in e4m3 as the tensor cores want it, stretched by 256 to use more of its range
    (its numbers end at 448), and summed from zero: a fresh accumulator every tile."""
    stored = (P * 256).astype(ml_dtypes.float8_e4m3fn)
    return stored.astype(np.float32) @ V_j.astype(np.float32) / 256


def _lse(m: Array, l: Array) -> Array:
    return m + np.log(_or(l, 0, 1))


def _or(x: Array, what: float, instead: float) -> Array:
    """``x`` with one value replaced by another."""
    return np.where(x == what, instead, x).astype(x.dtype)
