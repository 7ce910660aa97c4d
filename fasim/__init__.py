"""fasim plans, generates, proves and measures exact-attention CUDA kernels.

import fasim

problem = fasim.Problem(heads=32, kv_heads=8, seq=8192, causal=True, dtype="bf16")
planned = fasim.plan(problem, gpu="a100-80gb", algo="v2")
print(planned.tile, planned.time.seconds)
print(fasim.generate(planned).source)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fasim.gpu import Gpu
from fasim.plan import Plan
from fasim.problem import Problem

if TYPE_CHECKING:
    from fasim.entry import Entry
    from fasim.render import Kernel

__version__ = "0.1.0"


def plan(
    problem: Problem,
    gpu: Gpu | str = "auto",
    algo: str = "auto",
    tile: tuple[int, int] | None = None,
    reserve: int = 0,
) -> Entry:
    """The best tiles for a problem on a GPU (its name, a ``.toml`` file, or ``auto``).

    ``tile`` (block_q, block_kv) judges that tile instead of choosing one; ``reserve`` is device
    memory in bytes that something else needs. Raises NoPlanError when nothing fits.
    """
    from fasim import gpu as gpus
    from fasim import planner

    device = gpus.load(gpu) if isinstance(gpu, str) else gpu
    return planner.plan(problem, device, algo, tile=tile, reserve=reserve)


def generate(planned: Entry | Plan) -> Kernel:
    """The standalone CUDA file of a plan: ``.source`` is its text, ``.stem`` its name.

    Raises NoPlanError when there is no kernel for the plan, with the reason.
    """
    from fasim.errors import NoPlanError
    from fasim.render import render

    if isinstance(planned, Plan):
        return render(planned)
    if planned.plan is None:
        raise NoPlanError(
            f"no {planned.algo} kernel can be generated for this problem on {planned.gpu}",
            why=planned.reason,
            hint="fasim generates v1 and v2 forward and backward in fp32, fp16 and bf16, v2 forward"
            " also in e4m3, v3 forward in fp16, bf16 and e4m3; forward for compute capability 7.5"
            " and up, v3 for Hopper, backward for 8.0 and up",
        )
    return render(planned.plan)


__all__ = ["Gpu", "Plan", "Problem", "__version__", "generate", "plan"]
