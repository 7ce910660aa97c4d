"""How much of what could be tried is tried: all of it in a thorough run, a part in any other."""

import os

THOROUGH = bool(os.environ.get("FASIM_THOROUGH"))


def share(count: int, of: int = 4) -> int:
    """So many kernels or examples in a thorough run; else one ``of`` so many, one at least."""
    return count if THOROUGH else max(1, count // of)
