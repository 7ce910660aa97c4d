"""Runs every conformance case on a CUDA device and keeps what came out.

usage: python tests/conformance/record.py [FOLDER]

Writes FOLDER/<case>.npz (the outputs' bits) and FOLDER/device.json (the device, its driver, the
compiler, and the digest of each case). FOLDER is results/ beside this file unless given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from cases import CASES, Array, Case

from fasim.errors import CompilerError
from fasim.runners import gpu
from fasim.tensor_map import BYTES, parameter_offsets, placed
from fasim.toolchain import Nvcc, find_nvcc, run

RESULTS = Path(__file__).parent / "results"


def main(folder: Path = RESULTS) -> None:
    if reason := gpu.available():
        sys.exit(reason)
    nvcc, device = find_nvcc(), gpu.device()
    major, minor = device["compute_capability"]
    arch = f"sm_{major}{minor}"
    here = 10 * major + minor
    cases = [
        c for c in CASES if c.capability <= here and (c.arch[-1] != "a" or c.capability == here)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with _context():
        for case in cases:
            results: dict[str, Any] = outputs(case, nvcc, arch)
            np.savez_compressed(folder / f"{case.name}.npz", **results)
    record = {
        "device": device,
        "nvcc": nvcc.version,
        "arch": arch,
        "cases": {case.name: case.digest for case in cases},
    }
    (folder / "device.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{len(cases)} of {len(CASES)} cases recorded in {folder}")


def outputs(case: Case, nvcc: Nvcc, arch: str) -> dict[str, Array]:
    """What one launch wrote, as bits. The device's context must be current."""
    from pycuda import driver

    binary = cubin(case, nvcc, case.arch if case.arch.endswith("a") else arch)
    module = driver.module_from_buffer(binary)
    function = module.get_function(case.kernel)
    if case.smem_bytes > gpu.OPT_IN_SMEM_BYTES:
        attribute = driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        function.set_attribute(attribute, case.smem_bytes)
    arrays = case.arrays()
    memory = {name: driver.to_device(array) for name, array in arrays.items()}
    formats, values = _parameters(case, arrays, memory, binary)
    function.prepare(formats)
    grid, block = (case.grid, 1), (case.block, 1, 1)
    function.prepared_call(grid, block, *values, shared_size=case.smem_bytes)
    driver.Context.synchronize()
    return {name: driver.from_device_like(memory[name], arrays[name]) for name in case.expected}


def _parameters(
    case: Case, arrays: dict[str, Array], memory: dict[str, Any], binary: bytes
) -> tuple[list[str], list[Any]]:
    """struct formats and values, each where the driver wants it."""
    formats = [f"{BYTES}s" if name in case.maps else "P" for name in arrays]
    values: list[Any] = [
        case.maps[name].map(array, int(memory[name])).encoded() if name in case.maps
        else int(memory[name])
        for name, array in arrays.items()
    ]  # fmt: skip
    if not case.maps:
        return formats, values
    formats, gaps = placed(formats, parameter_offsets(binary, case.kernel))
    for gap in gaps:
        values.insert(gap, b"")
    return formats, values


def cubin(case: Case, nvcc: Nvcc, arch: str) -> bytes:
    """The compiled kernel. Raises CompilerError on an error or a warning."""
    with TemporaryDirectory() as name:
        source, target = Path(name, f"{case.kernel}.cu"), Path(name, "kernel.cubin")
        source.write_text(case.source)
        flags = ("-std=c++17", f"-arch={arch}", "-Werror", "all-warnings", "-cubin")
        status, text = run([str(nvcc.path), *flags, "-o", str(target), str(source)], Path(name))
        if status or text.strip():
            raise CompilerError(f"{case.name} does not compile cleanly", why=text)
        return target.read_bytes()


@contextmanager
def _context() -> Iterator[None]:
    """The primary context made current, and popped on every way out."""
    from pycuda import driver

    context: Any = driver.Device(0).retain_primary_context()
    context.push()
    try:
        yield
    finally:
        driver.Context.pop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
