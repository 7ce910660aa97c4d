"""Runs generated files on the CPU: the text, unchanged, compiled as C++ that checks itself.

The headers here give CUDA's words their meaning; each CUDA thread is a fiber, every access to
memory is seen, and what the hardware would let pass in silence is an error.
"""
