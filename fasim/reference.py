"""The oracle: float64 attention and its gradients, without tiles.

Everything fasim generates is judged by this file, so it shares no code with what it judges and
says each rule of docs/numerics.md once, in the plainest form. Arrays are (batch, heads, seq,
head_dim); keys and values may have fewer heads, each shared by a group of query heads. "bf16" and
"e4m3" arrays carry the ml_dtypes types. Work goes one head and a few rows at a time, so a long
sequence needs megabytes, not the square of its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fasim.errors import UsageError
from fasim.problem import Problem

Array = NDArray[Any]
Round = Callable[[Array], Array]

DTYPES: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
}
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4}
E4M3_MAX = 448.0
E4M3_STRETCH = 256.0  # the largest weight of a row in e4m3: a power of two, as near 448 as one is
E4M3_LOST = 2.0**-10 / E4M3_STRETCH  # of that weight, half a step of e4m3's smallest numbers
E4M3_LOST_LAZILY = 2.0**-10 / 32  # the same where that is 2^5 or more (V3)
CHUNK_SCORES = 1 << 21  # scores held at once: 16 MiB in float64


class Forward(NamedTuple):
    """o (batch, heads, rows, head_dim_v) and the natural-log lse (batch, heads, rows)."""

    o: Array
    lse: Array


class Gradients(NamedTuple):
    """Gradients in the shapes of q, k and v."""

    dq: Array
    dk: Array
    dv: Array


class Options(TypedDict, total=False):
    """What may be asked of the scores; anything left out is off.

    ``scale`` defaults to 1/sqrt(head_dim). ``window`` counts the keys left and right of the aligned
    one, -1 is open. ``bias`` is (1|batch, 1|heads, seq, seq_kv): numbers are added, booleans say
    which keys are visible. ``alibi`` adds -2^(-8h/heads) * distance, h from 1.
    """

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    bias: Array
    alibi: bool


def options_of(problem: Problem, bias: Array | None = None) -> Options:
    """The options of a Problem; ``bias`` holds the values where its kind is dense."""
    options = Options(
        scale=problem.scale,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        alibi=problem.bias == "alibi",
    )
    return options if bias is None else Options(**options, bias=bias)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    rows: Sequence[int] | Array | None = None,
    **options: Unpack[Options],
) -> Forward:
    """Attention in float64.

    ``rows`` picks query rows by index (all when None), so that a few rows of a long sequence are
    cheap to check. A row that sees no key gives o = 0 and lse = -inf; a NaN that a row can see
    stays NaN in it, and one that it cannot see leaves it alone.
    Raises UsageError when shapes or options do not fit together.
    """
    return _attend(q, k, v, np.float64, _exact, rows, options)


def standard(
    q: Array,
    k: Array,
    v: Array,
    dtype: str,
    *,
    out_dtype: str | None = None,
    rows: Sequence[int] | Array | None = None,
    **options: Unpack[Options],
) -> Forward:
    """Standard attention in ``dtype`` (fp32, fp16, bf16, e4m3): the yardstick of every tolerance.

    Scores and softmax are fp32, the normalised P is rounded to ``dtype``, P V accumulates in fp32
    and o is rounded to ``out_dtype`` (default: ``dtype``); lse stays fp32. For fp32 nothing is
    rounded further. In e4m3, q, k and v are the real values and P is rounded as ``weights_e4m3``
    does.
    """
    _unit_roundoff(dtype)
    kind = DTYPES[dtype]

    def rounded(p: Array) -> Array:
        return weights_e4m3(p) if dtype == "e4m3" else _cast(_cast(p, kind), np.float32)

    o, lse = _attend(q, k, v, np.float32, rounded, rows, options)
    return Forward(_cast(o, DTYPES[out_dtype or dtype]), lse)


def weights_e4m3(p: Array) -> Array:
    """Rows of weights rounded to e4m3 after they were stretched, each row's largest to
    E4M3_STRETCH: what of them is below 2^-14 of it becomes coarse, and nothing exceeds 448."""
    top: Array = p.max(axis=1, keepdims=True, initial=0.0)
    top = np.where(top == 0, 1, top).astype(p.dtype)
    stored = _cast(p / top * p.dtype.type(E4M3_STRETCH), DTYPES["e4m3"])
    rounded: Array = stored.astype(p.dtype) / p.dtype.type(E4M3_STRETCH) * top
    return rounded


def bound(
    ref: Array,
    q: Array,
    k: Array,
    v: Array,
    dtype: str,
    *,
    out_dtype: str | None = None,
    rows: Sequence[int] | Array | None = None,
    **options: Unpack[Options],
) -> Array:
    """Largest error allowed to each element of a small output, as of ``allowed``.

    ``ref`` is ``attention(...).o`` for the same arguments.
    """
    magnitude = attention(q, k, np.abs(v), rows=rows, **options).o
    return allowed(ref, magnitude, v, dtype, out_dtype)


def allowed(
    ref: Array,
    magnitude: Array,
    v: Array,
    dtype: str,
    out_dtype: str | None = None,
    lost: float = E4M3_LOST,
) -> Array:
    """1.25 (u P|V| + u_o |ref|) + 1e-6 an element, ``magnitude`` being P|V|.

    u and u_o are the unit roundoffs of ``dtype`` and ``out_dtype`` (default: the same). The sum
    covers P rounded before P V and o rounded after it, with a quarter to spare for fp32 work. In
    e4m3 also what is lost of weights far below their row's largest, ``lost`` of it each.
    """
    u, u_out = _unit_roundoff(dtype), _unit_roundoff(out_dtype or dtype)
    error: Array = 1.25 * (u * magnitude + u_out * np.abs(ref)) + 1e-6
    if dtype == "e4m3":
        keys = np.abs(v.astype(np.float64)).sum(axis=2, keepdims=True)
        error = error + lost * np.repeat(keys, ref.shape[1] // v.shape[1], axis=1)
    return error


@np.errstate(all="ignore")
def gradients(q: Array, k: Array, v: Array, do: Array, **options: Unpack[Options]) -> Gradients:
    """Gradients of sum(o * do) in float64; ``do`` has the shape of o.

    With P the probabilities: dV = Pᵀ dO, dP = dO Vᵀ, dS = P (dP - rowsum(P dP)), carried back
    through softcap and scale to dQ = dS K and dK = dSᵀ Q. Shared heads sum over their group.
    """

    def of_scores(p: Array, dp: Array, s: _Scored, b: int, h: int, rows: Array) -> Array:
        return _score_gradient(p, dp, s)

    return _differentiate(q, k, v, do, np.float64, of_scores, options)


@np.errstate(all="ignore")
def standard_gradients(
    q: Array, k: Array, v: Array, o: Array, do: Array, dtype: str, **options: Unpack[Options]
) -> Gradients:
    """Gradients of standard attention in ``dtype`` (fp32, fp16, bf16): the yardstick of theirs.

    P and dP are fp32, D = rowsum(dO * O) takes the O of that type, as it was kept; P and dS are
    rounded before their products, which accumulate in fp32, and the gradients after.
    """
    if dtype == "e4m3":
        raise UsageError("no gradients in e4m3", why="e4m3 has a forward pass only")
    _unit_roundoff(dtype)
    kind = DTYPES[dtype]

    def rounded(x: Array) -> Array:
        return _cast(_cast(x, kind), np.float32)

    def of_scores(p: Array, dp: Array, s: _Scored, b: int, h: int, rows: Array) -> Array:
        kept, given = (x[b, h, rows].astype(np.float32) for x in (o, do))
        delta = (kept * given).sum(axis=1, keepdims=True)
        return rounded(np.where(s.visible, p * (dp - delta) * s.slope, 0))

    found = _differentiate(q, k, v, do, np.float32, of_scores, options, rounded)
    return Gradients(*(_cast(x, kind) for x in found))


@np.errstate(all="ignore")
def gradient_sums(q: Array, k: Array, v: Array, do: Array, **options: Unpack[Options]) -> Gradients:
    """What the gradients' sums add up, in absolute values: the P|V| of each of them.

    |dV| <= Pᵀ|dO|, and with |dP| <= |dO||V|ᵀ, |dS| <= P (|dP| + rowsum(P |dP|)).
    """

    def of_scores(p: Array, dp: Array, s: _Scored, b: int, h: int, rows: Array) -> Array:
        weighted = np.where(s.visible, p * dp, 0)
        total = weighted.sum(axis=1, keepdims=True)
        return np.where(s.visible, (weighted + p * total) * s.slope, 0)

    return _differentiate(q, k, v, do, np.float64, of_scores, options, taken=np.abs)


def attention_varlen(
    q: Array, k: Array, v: Array, cu_q: Array, cu_kv: Array, **options: Unpack[Options]
) -> Forward:
    """Attention within each of several packed sequences.

    q, k and v are (tokens, heads, dim); sequence i is rows cu[i] to cu[i + 1]. Returns o (tokens,
    heads, head_dim_v) and lse (heads, tokens).
    """
    parts = [
        attention(_one(q, a), _one(k, b), _one(v, b), **options) for a, b in _sequences(cu_q, cu_kv)
    ]
    o = np.concatenate([_packed(part.o) for part in parts])
    return Forward(o, np.concatenate([part.lse[0] for part in parts], axis=1))


def gradients_varlen(
    q: Array, k: Array, v: Array, do: Array, cu_q: Array, cu_kv: Array, **options: Unpack[Options]
) -> Gradients:
    """Gradients of attention_varlen, in its shapes."""
    parts = [
        gradients(_one(q, a), _one(k, b), _one(v, b), _one(do, a), **options)
        for a, b in _sequences(cu_q, cu_kv)
    ]
    return Gradients(*(np.concatenate([_packed(x) for x in xs]) for xs in zip(*parts, strict=True)))


class Quantised(NamedTuple):
    """e4m3 values with their scales: real = stored * scale.

    ``stored`` has the shape of the source (batch, heads, seq, dim), ``scales`` (fp32) is (1, 1, 1,
    1) for a tensor, (batch, heads, 1, 1) for heads and (batch, heads, blocks, 1) for blocks of
    ``block`` rows.
    """

    stored: Array
    scales: Array
    block: int

    def real(self) -> Array:
        """The float64 values that attention over the stored ones works with."""
        scales = _per_row(self.scales, self.stored.shape[2], self.block)
        return self.stored.astype(np.float64) * scales


def quantise(x: Array, scales: str = "tensor", block: int = 128) -> Quantised:
    """Round ``x`` (batch, heads, seq, dim) to e4m3, one scale per tensor, head or block of rows.

    The largest finite magnitude of each group maps to 448, the largest e4m3 number. Infinities
    saturate there: clipped first, since the cast turns what it cannot hold into NaN. NaN stays.
    """
    x = x.astype(np.float64)
    largest = _LARGEST[scales](np.where(np.isfinite(x), np.abs(x), 0.0), block)
    step = np.maximum(largest / E4M3_MAX, np.finfo(np.float32).tiny).astype(np.float32)
    scaled = np.clip(x / _per_row(step, x.shape[2], block), -E4M3_MAX, E4M3_MAX)
    return Quantised(scaled.astype(DTYPES["e4m3"]), step, block)


def _largest_in_blocks(x: Array, block: int) -> Array:
    starts = np.arange(0, x.shape[2], block)
    per_row = x.max(axis=3, keepdims=True, initial=0.0)
    return np.maximum.reduceat(per_row, starts, axis=2) if len(starts) else per_row


_LARGEST: dict[str, Callable[[Array, int], Array]] = {
    "tensor": lambda x, _: x.max(keepdims=True, initial=0.0),
    "head": lambda x, _: x.max(axis=(2, 3), keepdims=True, initial=0.0),
    "block": _largest_in_blocks,
}


def _per_row(scales: Array, rows: int, block: int) -> Array:
    """Scales in float64, laid out to broadcast against the values they belong to."""
    blocks = np.repeat(scales, block, axis=2) if scales.shape[2] > 1 else scales
    return blocks[:, :, :rows].astype(np.float64)


class _Scored(NamedTuple):
    """Scores of some rows against all keys, hidden ones -inf; which pairs are visible; and the
    derivative of the softcap at each pair."""

    value: Array
    visible: Array
    slope: Array | float


@dataclass(frozen=True, kw_only=True)
class _Score:
    """The score of every pair, in the order scale, softcap, bias, mask."""

    shape: tuple[int, int, int, int]  # batch, heads, seq, seq_kv
    precision: type[np.floating[Any]]
    scale: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: Array | None = None
    alibi: bool = False

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, precision: type[np.floating[Any]], options: Options
    ) -> _Score:
        _check_shapes(q, k, v)
        asked: dict[str, Any] = {"scale": 1 / math.sqrt(q.shape[3]), **options}
        score = cls(shape=(*q.shape[:3], k.shape[2]), precision=precision, **asked)
        score._check()
        return score

    def _check(self) -> None:
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise UsageError(f"softcap {self.softcap} must be finite and at least 0 (0 is off)")
        if self.bias is not None and not _broadcasts(self.bias.shape, self.shape):
            raise UsageError(
                f"a bias of shape {self.bias.shape} does not fit",
                why=f"it must be (1 or batch, 1 or heads, seq, seq_kv) of {self.shape}",
            )

    def __call__(self, b: int, h: int, rows: Array, q: Array, k: Array) -> _Scored:
        """Scores of ``q`` (rows, head_dim), the rows numbered ``rows`` of head ``h``."""
        s, slope = self._capped(self.precision(self.scale) * (q @ k.T))
        visible = self._visible(rows)
        if self.alibi:
            s -= (self._alibi_slope(h) * np.abs(self._distance(rows))).astype(self.precision)
        if self.bias is not None:
            bias = np.broadcast_to(self.bias, self.shape)[b, h, rows]
            s, visible = _biased(s, visible, bias)
        return _Scored(np.where(visible, s, -np.inf).astype(self.precision), visible, slope)

    def _capped(self, s: Array) -> tuple[Array, Array | float]:
        if self.softcap == 0:
            return s, 1.0
        tanh = np.tanh(s / self.precision(self.softcap))
        return self.precision(self.softcap) * tanh, 1 - tanh**2

    def _alibi_slope(self, h: int) -> float:
        return math.exp2(-8 * (h + 1) / self.shape[1])

    def _distance(self, rows: Array) -> Array:
        """Keys to the right of the one aligned with each row: the last key with the last row."""
        seq, seq_kv = self.shape[2:]
        distance: Array = np.arange(seq_kv)[None, :] - (rows[:, None] + seq_kv - seq)
        return distance

    def _visible(self, rows: Array) -> Array:
        distance = self._distance(rows)
        left, right = self.window
        right = 0 if self.causal else right
        visible = np.ones(distance.shape, bool)
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
        return visible


@np.errstate(all="ignore")
def _attend(
    q: Array,
    k: Array,
    v: Array,
    precision: type[np.floating[Any]],
    rounded: Round,
    rows: Sequence[int] | Array | None,
    options: Options,
) -> Forward:
    score = _Score.of(q, k, v, precision, options)
    picked = np.arange(q.shape[2])[slice(None) if rows is None else np.asarray(rows, np.intp)]
    o = np.zeros((*q.shape[:2], len(picked), v.shape[3]), precision)
    lse = np.zeros(o.shape[:3], precision)
    for b, h in np.ndindex(*q.shape[:2]):
        shared = h // (q.shape[1] // k.shape[1])
        kh, vh = (x[b, shared].astype(precision) for x in (k, v))
        for part in _chunks(np.arange(len(picked)), k.shape[2]):
            s = score(b, h, picked[part], q[b, h, picked[part]].astype(precision), kh)
            p, lse[b, h, part] = _softmax(s.value)
            o[b, h, part] = _sum_visible(rounded(p), s.visible, vh)
    return Forward(o, lse)


def _softmax(s: Array) -> tuple[Array, Array]:
    """Probabilities and natural-log sum of each row; a row of -inf gives zeros and -inf."""
    top: Array = s.max(axis=1, initial=-np.inf)
    top = np.where(np.isneginf(top), 0, top).astype(s.dtype)
    p = np.exp(s - top[:, None])
    total = p.sum(axis=1)
    p /= np.where(total == 0, 1, total).astype(s.dtype)[:, None]
    return p, top + np.log(total)


def _differentiate(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    precision: type[np.floating[Any]],
    of_scores: Callable[[Array, Array, _Scored, int, int, Array], Array],
    options: Options,
    rounded: Round = lambda x: x,
    taken: Round = lambda x: x,
) -> Gradients:
    """The products that make gradients, of what is ``taken`` of each tensor. ``of_scores`` makes dS
    from P, dP and the scores of some ``rows`` of head ``h`` of ``b``."""
    score = _Score.of(q, k, v, precision, options)
    dq, dk, dv = (np.zeros(x.shape, precision) for x in (q, k, v))
    for b, h in np.ndindex(*q.shape[:2]):
        shared = h // (q.shape[1] // k.shape[1])
        kh, vh = (x[b, shared].astype(precision) for x in (k, v))
        for rows in _chunks(np.arange(q.shape[2]), k.shape[2]):
            qh, doh = (x[b, h, rows].astype(precision) for x in (q, do))
            s = score(b, h, rows, qh, kh)
            p = _softmax(s.value)[0]
            dp = taken(doh) @ taken(vh).T
            ds = of_scores(p, dp, s, b, h, rows) * precision(score.scale)
            dq[b, h, rows] = _sum_visible(ds, s.visible, taken(kh))
            dk[b, shared] += _sum_visible(ds.T, s.visible.T, taken(qh))
            dv[b, shared] += _sum_visible(rounded(p).T, s.visible.T, taken(doh))
    return Gradients(dq, dk, dv)


def _score_gradient(p: Array, dp: Array, s: _Scored) -> Array:
    """Gradient with respect to the scaled scores, zero where a key is hidden."""
    weighted = np.where(s.visible, p * dp, 0)
    delta = weighted.sum(axis=1, keepdims=True)
    return np.where(s.visible, (weighted - p * delta) * s.slope, 0)


def _sum_visible(weights: Array, visible: Array, x: Array) -> Array:
    """``weights @ x`` over visible pairs only: 0 * NaN of a hidden pair must not count."""
    total: Array = weights @ np.where(np.isfinite(x).all(axis=1, keepdims=True), x, 0)
    for j in np.flatnonzero(~np.isfinite(x).all(axis=1)):
        total += np.where(visible[:, j, None], weights[:, j, None] * x[j], 0)
    return total


def _biased(s: Array, visible: Array, bias: Array) -> tuple[Array, Array]:
    """Scores and visibility after a dense bias, where false and -inf hide a key."""
    if bias.dtype == bool:
        return s, visible & bias
    bias = bias.astype(s.dtype)
    return s + bias, visible & ~np.isneginf(bias)


def _chunks(indices: Array, seq_kv: int) -> Iterator[Array]:
    """Runs of row indices whose scores fit in one chunk."""
    step = max(1, CHUNK_SCORES // max(1, seq_kv))
    return (indices[i : i + step] for i in range(0, len(indices), step))


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    fits = (
        all(x.ndim == 4 for x in (q, k, v))
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1:3] == v.shape[1:3]
        and q.shape[3] == k.shape[3]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        raise UsageError(
            "q, k and v do not fit together",
            why=f"their shapes are {q.shape}, {k.shape} and {v.shape}",
            hint="use (batch, heads, seq, dim), heads a multiple of those of k and v",
        )


def _broadcasts(shape: tuple[int, ...], full: tuple[int, int, int, int]) -> bool:
    """Whether a dense bias fits: batch and heads may be 1, the lengths may not."""
    outer = all(n in (1, m) for n, m in zip(shape[:2], full[:2], strict=False))
    return len(shape) == 4 and outer and shape[2:] == full[2:]


def _unit_roundoff(dtype: str) -> float:
    if dtype not in UNIT_ROUNDOFF:
        raise UsageError(
            f"no standard attention in {dtype}", why=f"there is one in {', '.join(UNIT_ROUNDOFF)}"
        )
    return UNIT_ROUNDOFF[dtype]


def _exact(x: Array) -> Array:
    return x


def _cast(x: Array, kind: Any) -> Array:
    """``x`` as ``kind``; too large becomes inf without a warning."""
    with np.errstate(over="ignore"):
        cast: Array = x.astype(kind)
    return cast


def _sequences(cu_q: Array, cu_kv: Array) -> Iterator[tuple[slice, slice]]:
    """The rows of each packed sequence, of q and of k."""
    tokens_q, tokens_kv = (map(slice, cu[:-1], cu[1:]) for cu in (cu_q, cu_kv))
    return zip(tokens_q, tokens_kv, strict=True)


def _one(x: Array, tokens: slice) -> Array:
    """(tokens, heads, dim) to a batch of one, (1, heads, seq, dim)."""
    return x[tokens].swapaxes(0, 1)[None]


def _packed(x: Array) -> Array:
    """Inverse of _one."""
    tokens: Array = x[0].swapaxes(0, 1)
    return tokens
