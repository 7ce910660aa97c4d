"""fasim plans, generates, proves and measures exact-attention CUDA kernels."""

__version__ = "0.1.0"
