"""What the documents and docstrings show runs."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"agentstore": "agentstore", "agentstore.runtime": "runtime", "agentstore.tools": "tools"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def modules() -> list[str]:
    names = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return names


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_doctests() -> None:
    finder = doctest.DocTestFinder()
    examples = sum(len(test.examples) for name in modules() for test in finder.find(importlib.import_module(name)))
    assert examples > 100


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """(line, source) of every ```python block."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start()) + 2, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


WITH_EXAMPLES = [path for path in DOCUMENTS if python_blocks(path)]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.name)
def test_examples_of_documents_run(path: Path, tmp_path: Path) -> None:
    """In the order of the page, as one program in an empty directory: what a reader does who copies all of it."""
    # Each block keeps its line number in the page, so that an error points there.
    program = tmp_path / path.with_suffix(".py").name
    lines: list[str] = []
    for line, source in python_blocks(path):
        lines += [""] * (line - 1 - len(lines)) + source.splitlines()
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-P", str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{path.name}: {done.stderr}"


SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_COMMANDS = [path for path in DOCUMENTS if SHELL.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_of_documents_run(path: Path, tmp_path: Path) -> None:
    """In the order of the page, as one script that ends at the first command that fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    here = shlex.quote(sys.executable)
    for name, command in [("python", here), ("agentstore", f"{here} -m agentstore.tools.cli")]:
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    script = "\n".join(SHELL.findall(path.read_text(encoding="utf-8")))
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        ["sh", "-eu"],
        input=script,
        cwd=work,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{path.name}: {done.stderr}"
    assert not done.stderr or "Traceback" not in done.stderr


def test_the_page_about_operations_shows_commands() -> None:
    assert "operations.md" in {path.name for path in WITH_COMMANDS}


def test_the_readme_has_examples() -> None:
    assert len(python_blocks(ROOT / "README.md")) >= 2


COMMANDS = [
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/agentstore demo",
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest",
]


def test_the_readme_has_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for command in COMMANDS:
        assert f"    {command}" in lines or command in lines


def test_ci_runs_the_command_of_the_readme() -> None:
    assert COMMANDS[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
