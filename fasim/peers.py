"""What fasim is measured against: attention in PyTorch, and FlashAttention-3 where it is installed.

Only this module and fasim.torch import torch. Every peer is a call without arguments that queues
one forward pass on the current stream and returns o (batch, heads, seq, head_dim).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from fasim.errors import MissingToolError
from fasim.plan import tensor_shapes
from fasim.problem import Problem

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
}
SDPA_SWITCHES = {
    "fa2": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
    "memory efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}


@dataclass(frozen=True)
class Peer:
    """An implementation to compare with; ``reason`` says why ``launch`` is missing."""

    name: str
    launch: Callable[[], torch.Tensor] | None
    reason: str = ""


def tensors(problem: Problem, seed: int = 0, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Unit-normal q, k, v in the problem's type. Raises MissingToolError without a device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingToolError("torch finds no CUDA device", hint="install a CUDA build of torch")
    draw = torch.Generator(device).manual_seed(seed)
    shapes, dtype = tensor_shapes(problem), DTYPES[problem.dtype]
    return {
        name: torch.randn(shapes[name], generator=draw, device=device).to(dtype)
        for name in ("q", "k", "v")
    }


def peers(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Peer]:
    """Every peer of a forward problem, tried once: unfused, fa2, cudnn, fa3."""
    makers = {
        "unfused": lambda: unfused(problem, q, k, v),
        "fa2": lambda: sdpa("fa2", problem, q, k, v),
        "cudnn": lambda: sdpa("cudnn", problem, q, k, v),
        "fa3": lambda: fa3(problem, q, k, v),
    }
    return [_tried(name, make) for name, make in makers.items()]


def _tried(name: str, make: Callable[[], Callable[[], torch.Tensor]]) -> Peer:
    try:
        launch = make()
        launch()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (RuntimeError, ImportError, ValueError) as error:  # torch's ways of saying it cannot
        return Peer(name, None, str(error).strip().split("\n")[0])
    return Peer(name, launch)


def unfused(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Standard attention in three calls with S and P in memory; the mask is a fourth."""
    k, v = _expanded(problem, k, v)
    transposed = k.transpose(2, 3)
    hidden = _hidden(problem, q.device) if problem.causal else None

    def launch() -> torch.Tensor:
        s = torch.matmul(q, transposed).mul_(problem.scale)
        if hidden is not None:
            s.masked_fill_(hidden, float("-inf"))
        return torch.matmul(torch.softmax(s, dim=-1), v)

    return launch


def _hidden(problem: Problem, device: torch.device) -> torch.Tensor:
    """(seq, seq_kv), true where a causal mask aligned bottom-right hides the key."""
    ones = torch.ones(problem.seq, problem.seq_kv, dtype=torch.bool, device=device)
    return ones.triu(problem.seq_kv - problem.seq + 1)


def _expanded(
    problem: Problem, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One key and value head for each query head, copied."""
    if problem.group == 1:
        return k, v
    return k.repeat_interleave(problem.group, 1), v.repeat_interleave(problem.group, 1)


def sdpa(
    backend: str, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """torch's scaled_dot_product_attention with one backend alone.

    A backend that cannot share key heads gets them copied, outside what is timed.
    """
    if problem.causal and problem.seq != problem.seq_kv:
        raise ValueError("torch aligns a causal mask top-left, fasim bottom-right")
    if problem.group == 1:
        return _sdpa(backend, problem, q, k, v)
    try:
        shared = _sdpa(backend, problem, q, k, v, enable_gqa=True)
        shared()
    except RuntimeError:
        return _sdpa(backend, problem, q, *_expanded(problem, k, v))
    return shared


def _sdpa(
    backend: str,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    enable_gqa: bool = False,
) -> Callable[[], torch.Tensor]:
    options: dict[str, Any] = {"is_causal": problem.causal, "scale": problem.scale}

    def launch() -> torch.Tensor:
        for name, switch in SDPA_SWITCHES.items():
            switch(name == backend)
        return scaled_dot_product_attention(q, k, v, **options, enable_gqa=enable_gqa)

    return launch


def fa3(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """FlashAttention-3's forward pass from the fa3-fwd wheel, bf16 and e4m3, the latter with scale
    factors of 1 for each head."""
    flash_attn_func = import_module("fa3_fwd_interface").flash_attn_func
    if problem.dtype not in ("bf16", "e4m3"):
        raise ValueError(f"the fa3-fwd wheel has no {problem.dtype}")
    tokens = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    ones = torch.ones(problem.batch, problem.kv_heads, device=q.device)
    names = ("q_descale", "k_descale", "v_descale") if problem.dtype == "e4m3" else ()
    options: dict[str, Any] = dict.fromkeys(names, ones)
    options |= {"softmax_scale": problem.scale, "causal": problem.causal}

    def launch() -> torch.Tensor:
        out = flash_attn_func(*tokens, **options)
        o: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return o.transpose(1, 2)

    return launch
