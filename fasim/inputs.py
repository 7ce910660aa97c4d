"""The arrays that options of attention read, made on the host.

The slopes of ALiBi (Press, Smith and Lewis 2022), and where packed sequences begin and end. A
caller may bring others; these are what properties and timings use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim.plan import SCALE_INPUTS, Launch

Array = NDArray[Any]


def alibi_slopes(heads: int) -> Array:
    """Slopes (heads,), fp32: 2^(-8 h / heads), h from 1."""
    return np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)


def cu_seqlens(lengths: Sequence[int] | Array) -> Array:
    """(sequences + 1,) int32: sequence i is tokens [i] to [i + 1] of the packed arrays."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def option_arrays(launch: Launch) -> dict[str, Array]:
    """ALiBi's usual slopes, equally long sequences and scale factors of 1, where a launch reads
    them."""
    made: dict[str, Array] = {}
    for name, (shape, _) in launch.inputs.items():
        if name == "slopes":
            made[name] = alibi_slopes(*shape)
        elif name.startswith("cu_seqlens"):
            tokens, sequences = launch.inputs[name[-1]][0][0], shape[0] - 1
            made[name] = cu_seqlens([tokens // sequences] * sequences)
        elif name in SCALE_INPUTS:
            made[name] = np.ones(shape, np.float32)
    return made
