"""Runs the page's code without a page: Node, or the one that Playwright brings."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources, util
from pathlib import Path
from typing import Any

MODULES = ("model", "events", "softmax")
REPORT = Path(str(resources.files("fasim.report")))


def node() -> str:
    """Path of a Node, "" if there is none."""
    if found := shutil.which("node"):
        return found
    spec = util.find_spec("playwright")
    beside = Path(spec.origin).parent / "driver/node" if spec and spec.origin else Path()
    return str(beside) if beside.is_file() else ""


def run(script: str, data: Any, **edits: tuple[str, str]) -> Any:
    """What ``script``, a function body over ``data``, returns; the page's files are loaded, with
    one piece of text replaced by another in those that ``edits`` names."""
    text = "\n".join(_module(name, *edits.get(name, ("", ""))) for name in MODULES)
    text += "\nconst data = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
    text += f"\nprocess.stdout.write(JSON.stringify((() => {{ {script} }})()));"
    done = subprocess.run(
        [node(), "-e", text], input=json.dumps(data), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _module(name: str, right: str, wrong: str) -> str:
    text = (REPORT / f"{name}.js").read_text(encoding="utf-8")
    if right and text.count(right) != 1:
        raise ValueError(f"{right!r} is not once in {name}.js")
    code = text.replace(right, wrong) if right else text
    loaded = f"(() => {{ const module = {{}};\n{code}\nreturn module.exports; }})()"
    return f"Object.assign(globalThis, {loaded});"
