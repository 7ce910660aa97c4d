"""The imports point one way, and the rules a reader relies on hold everywhere."""

import ast
import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "fasim").rglob("*.py"))

# Each module may import only from modules of a lower layer, or of its own package.
LAYERS = (
    {"errors", "rounds", "settings", "tiled"},
    {
        "cache",
        "diagnostics",
        "gpu",
        "presets",
        "problem",
        "screen",
        "tensor_map",
        "toolchain",
        "units",
    },
    {"plan", "reference"},
    {"model", "peers", "picture", "render"},
    {"compile", "emulator", "entry", "files", "inputs", "legality", "quantise"},
    {"candidates", "explain", "runners"},
    {"doctor", "planner", "properties", "work"},
    {"__init__", "accuracy", "bench", "catalogue", "comparison", "options", "report"},
    {"timeline"},
    {"show"},
    {"demo"},
    {"cli"},
    {"__main__"},
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "fasim").with_suffix("").parts
    return parts[0] if parts[0] != "gpus" else "gpu"


def layer_of(name: str) -> int:
    found = [depth for depth, names in enumerate(LAYERS) if name in names]
    assert found, f"fasim.{name} has no layer: add it to LAYERS"
    return found[0]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import, which these tests cannot follow"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def fasim_imports(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("fasim.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = name_of(path)
    for other in fasim_imports(path) - {own, "__version__"}:
        assert layer_of(other) < layer_of(own), f"fasim.{own} imports fasim.{other}"


def test_every_module_has_one_layer() -> None:
    listed = [name for names in LAYERS for name in names]
    assert sorted(listed) == sorted({name_of(path) for path in MODULES})


@pytest.mark.parametrize(
    ("noun", "allowed"),
    [("errors", set()), ("problem", {"errors"}), ("gpu", {"errors"}),
     ("plan", {"errors", "problem", "rounds"}), ("reference", {"errors", "problem"})],
)  # fmt: skip
def test_the_core_nouns_need_only_each_other(noun: str, allowed: set[str]) -> None:
    assert fasim_imports(ROOT / f"fasim/{noun}.py") <= allowed


@pytest.mark.parametrize(
    ("package", "allowed"), [("pycuda", {"runners/gpu.py"}), ("torch", {"peers.py", "torch.py"})]
)
def test_one_home_per_heavy_package(package: str, allowed: set[str]) -> None:
    for path in MODULES:
        if any(name.split(".")[0] == package for name in imports(path)):
            assert str(path.relative_to(ROOT / "fasim")) in allowed


def test_model_and_reference_know_nothing_of_templates_or_runners() -> None:
    for path in [*(ROOT / "fasim/model").glob("*.py"), ROOT / "fasim/reference.py"]:
        assert not fasim_imports(path) & {"render", "compile", "runners", "tiled", "planner"}


def test_asm_lives_in_ptx_only() -> None:
    for path in (ROOT / "templates").rglob("*.cu*"):
        code = re.sub(r"//.*", "", path.read_text())
        assert (path.parent.name == "ptx") or not re.search(r"\basm\b", code), path


PTX_FILES = sorted((ROOT / "templates/ptx").iterdir())


@pytest.mark.parametrize("path", PTX_FILES, ids=lambda path: path.stem)
def test_every_ptx_file_can_be_switched_off_for_an_emulator(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("namespace ptx {\n#ifndef FASIM_EMULATE\n")
    assert text.endswith("#endif\n}  // namespace ptx\n")


PLAIN_PTX_FILES = [path for path in PTX_FILES if path.stem != "wgmma"]  # it must name N registers


@pytest.mark.parametrize("path", PLAIN_PTX_FILES, ids=lambda path: path.stem)
def test_a_ptx_file_is_one_instruction_and_plain_cuda(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"//%|//#|\$\(|/\*[%#]", text)
    wrappers = re.findall(r"__forceinline__ \w+ (\w+)\(", text)
    assert wrappers[0] == path.stem
    assert all(name.startswith(path.stem) for name in wrappers)


def test_kernels_include_no_header() -> None:
    for path in (ROOT / "templates").rglob("*.cu*"):
        assert (
            path.name in ("main.cu", "main_bwd.cu", "main_v3.cu")
            or "#include" not in path.read_text()
        ), path


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    present = {
        "fasim" if path.parent.name == "fasim" else f"fasim.{path.parent.name}"
        for path in MODULES
        if path.name == "__init__.py"
    }
    assert listed == present | {"fasim.templates"}


def test_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.name}": len(ast.unparse(node).splitlines())
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    longest = max(lengths, key=lengths.__getitem__)
    assert lengths[longest] <= 60, f"{longest} has {lengths[longest]} lines"
