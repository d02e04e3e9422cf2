"""Imports go downwards, the engine reaches the disk through one module, and each module is loaded under one name.

tools > runtime > agentstore > engine > codec > errors: nothing in a lower layer knows a higher one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentstore

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "agentstore": ROOT / "agentstore",
    "agentstore.runtime": ROOT / "runtime",
    "agentstore.tools": ROOT / "tools",
}

# Lowest first. errors stands below all: every layer raises from one tree.
LAYERS = [
    "agentstore.errors",
    "agentstore.codec",
    "agentstore.engine",
    "agentstore",
    "agentstore.runtime",
    "agentstore.tools",
]
# What is installed beside the layers for whoever tests an agent; it may use all of the store and its parts.
TESTING = "agentstore.testing"


def module_name(path: Path) -> str:
    for package, folder in sorted(PACKAGES.items(), reverse=True):
        if path.is_relative_to(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise ValueError(f"{path} is in no package")


MODULES = {module_name(path): path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))}


def imports_of(name: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import of a module, inside functions too, but not for the type checker alone."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in todo:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else source


def layer_of(name: str) -> int | None:
    """The index of the layer of a module of this project; None for others, and for what stands beside the layers."""
    if name != "agentstore" and not name.startswith("agentstore."):
        return None
    if name == TESTING or name.startswith(f"{TESTING}."):
        return None
    best = max((x for x in LAYERS if name == x or name.startswith(f"{x}.")), key=len)
    return LAYERS.index(best)


def test_the_modules_are_found() -> None:
    assert len(MODULES) > 60
    for layer in LAYERS:
        assert layer in MODULES
    assert layer_of("agentstore.engine.files") == 2
    assert layer_of("agentstore.store") == 3
    found = {module for _, module in imports_of("agentstore.codec.cbor")}
    assert found >= {"agentstore.codec.shape", "agentstore.errors", "cbor2"}


@pytest.mark.parametrize("name", [name for name in MODULES if layer_of(name) is not None])
def test_imports_go_downwards(name: str) -> None:
    mine = layer_of(name)
    assert mine is not None
    for line, other in imports_of(name):
        theirs = layer_of(other)
        assert theirs is None or theirs <= mine, f"{MODULES[name]}:{line}: {name} imports {other} of a higher layer"


@pytest.mark.parametrize("layer", ["agentstore.codec", "agentstore.engine"])
def test_importing_a_lower_layer_loads_no_higher_one(layer: str) -> None:
    """What the source says, asked of the interpreter (`import agentstore` alone would load all of the store)."""
    mine = [name for name in MODULES if name == layer or name.startswith(f"{layer}.")]
    script = (
        "import importlib, sys, types\n"
        "package = types.ModuleType('agentstore')\n"
        f"package.__path__ = [{str(ROOT / 'agentstore')!r}]\n"
        "sys.modules['agentstore'] = package\n"
        f"for name in {mine!r}:\n"
        "    importlib.import_module(name)\n"
        "print(*(m for m in sys.modules if m.startswith('agentstore.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert set(mine) <= set(loaded)
    for name in loaded:
        assert (layer_of(name) or 0) <= LAYERS.index(layer), f"{layer} loads {name}"


def public_part(module: str) -> bool:
    """Modules that users import by name: they may stand in a `from … import` of the layers on top of the public API."""
    return module in ("agentstore", "agentstore.errors")


RUNTIME = [name for name in MODULES if name == "agentstore.runtime" or name.startswith("agentstore.runtime.")]


@pytest.mark.parametrize("name", RUNTIME)
def test_the_runtime_stands_on_the_public_api(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for line, other in imports_of(name):
        if layer_of(other) is not None:
            assert other.startswith("agentstore.runtime") or public_part(other), f"{name}:{line} imports {other}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "agentstore":
            assert {alias.name for alias in node.names} <= set(agentstore.__all__), f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            assert node.level == 1, f"{name}:{node.lineno} leaves its package relatively"


TOOLS = [name for name in MODULES if name == "agentstore.tools" or name.startswith("agentstore.tools.")]


# The benchmarks measure the parts, too; the demo kills its worker inside a write of the engine.
BELOW_THE_STORE = {
    "agentstore.tools.bench": "agentstore.engine",
    "agentstore.tools.demo.crash": "agentstore.engine.files",
}


@pytest.mark.parametrize("name", TOOLS)
def test_the_tools_use_no_private_names(name: str) -> None:
    """Operators' tools may read what the store's modules offer, but nothing below them, and no `_private`."""
    lowest = LAYERS.index("agentstore")
    allowed = [below for user, below in BELOW_THE_STORE.items() if name == user or name.startswith(f"{user}.")]
    for line, other in imports_of(name):
        layer = layer_of(other)
        if layer is not None and layer < lowest and not public_part(other):
            assert any(other.startswith(below) for below in allowed), f"{name}:{line} imports {other}"
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentstore"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert set(private) <= {"__version__"}, f"{name}:{node.lineno} imports {private}"


def sources() -> list[Path]:
    folders = ["agentstore", "runtime", "tools", "tests", "fuzz"]
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_imported_under_a_second_name(path: Path) -> None:
    """`import runtime` and `import tools` work in a checkout, load everything twice, and fail once installed."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else []
        )
        for name in names:
            assert name.partition(".")[0] not in ("runtime", "tools"), f"{path}:{getattr(node, 'lineno', 0)}: {name}"


# --- one seam for system calls --------------------------------------------------------

SEAM = "agentstore.engine.files"
SYSTEM_CALLS = frozenset(
    "open fdopen close read write pread preadv pwrite pwritev readv writev lseek truncate ftruncate posix_fallocate"
    " fsync fdatasync sync sendfile copy_file_range splice"
    " rename renames replace link symlink unlink remove rmdir removedirs mkdir makedirs mkfifo mknod"
    " stat lstat fstat statvfs fstatvfs access scandir listdir walk chmod fchmod chown fchown utime".split()
)
OTHER_WAYS = ("fcntl", "mmap", "shutil", "tempfile", "pathlib", "io", "subprocess", "socket", "ctypes")


def calls_of(name: str) -> Iterator[tuple[int, str]]:
    """(line, call) of everything in a module that reaches the operating system's files."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr in SYSTEM_CALLS:
                yield node.lineno, f"os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in ("os", "os.path"):
            yield from ((node.lineno, f"from os import {a.name}") for a in node.names if a.name in SYSTEM_CALLS)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if not (isinstance(node, ast.ImportFrom) and node.level):
                yield from ((node.lineno, f"import {m}") for m in modules if m.partition(".")[0] in OTHER_WAYS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "__import__"):
            yield node.lineno, node.func.id


# What is no system call on a file of a store, with its reason.
HARMLESS = {
    ("agentstore.engine.checking", "import tempfile"): "verify reads a copy, in a directory of its own",
    (
        "agentstore.engine.embedded",
        "import ctypes",
    ): "one reference count, so that a child never closes what it inherited",
}

ENGINE = [name for name in MODULES if name.startswith("agentstore.engine") and name != SEAM]


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_reaches_files_through_one_module(name: str) -> None:
    """The crash simulator stands in for that module: a call beside it would be neither failed nor recorded."""
    found = [(line, call) for line, call in calls_of(name) if (name, call) not in HARMLESS]
    assert not found, f"{MODULES[name]}: {found} belong into files.py"


def test_what_is_harmless_is_still_there() -> None:
    """An exception that nobody needs any more would hide the next one who uses it."""
    for name, call in HARMLESS:
        assert call in {found for _, found in calls_of(name)}, f"take ({name}, {call}) off the list"


def test_the_seam_itself_is_full_of_them() -> None:
    """The search above finds what there is to find."""
    found = {call for _, call in calls_of(SEAM)}
    assert found >= {"os.open", "os.pread", "os.pwrite", "os.fsync", "os.unlink", "import fcntl", "import mmap"}
