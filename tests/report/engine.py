"""Runs the page's code without a page: Node, or the one that Playwright brings."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources, util
from pathlib import Path
from typing import Any

REPORT = Path(str(resources.files("fasim.report")))


def node() -> str:
    """Path of a Node, "" if there is none."""
    if found := shutil.which("node"):
        return found
    spec = util.find_spec("playwright")
    beside = Path(spec.origin).parent / "driver/node" if spec and spec.origin else Path()
    return str(beside) if beside.is_file() else ""


def run(script: str, data: Any) -> Any:
    """What ``script``, a function body over ``data``, returns; the page's files are loaded."""
    modules = ("model", "events", "softmax")
    text = "\n".join(f"Object.assign(globalThis, require('{REPORT / m}.js'));" for m in modules)
    text += "\nconst data = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
    text += f"\nprocess.stdout.write(JSON.stringify((() => {{ {script} }})()));"
    done = subprocess.run(
        [node(), "-e", text], input=json.dumps(data), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
