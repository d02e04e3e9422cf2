"""The runtime stands on the public API alone, and is one package under one name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import agentstore

RUNTIME = Path(__file__).resolve().parent.parent / "runtime"


def imports(path: Path) -> list[tuple[int, str]]:
    """(level, module) of every import of a file, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


def test_the_runtime_imports_itself_relatively_and_the_store_by_its_public_names() -> None:
    modules = sorted(RUNTIME.glob("*.py"))
    assert len(modules) > 10
    for path in modules:
        for level, module in imports(path):
            top = module.partition(".")[0]
            assert level <= 1, f"{path.name}: leaves its package"
            assert level == 1 or top not in ("runtime", "tools"), f"{path.name}: import {module} would load it twice"
            assert level == 1 or top != "agentstore" or module == "agentstore", f"{path.name}: {module} is not public"


def test_what_the_runtime_takes_from_the_store_is_in_all() -> None:
    for path in RUNTIME.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "agentstore" and node.level == 0:
                assert {name.name for name in node.names} <= set(agentstore.__all__), path.name


def test_nothing_below_knows_the_runtime() -> None:
    package = RUNTIME.parent / "agentstore"
    for path in sorted(package.rglob("*.py")):
        if "testing" not in path.parts:
            assert not any("runtime" in module.split(".") for _, module in imports(path)), path


def test_importing_the_runtime_loads_no_terminal_libraries() -> None:
    code = (
        "import sys, agentstore.runtime; print([m for m in ('typer', 'rich', 'click', 'pytest') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
