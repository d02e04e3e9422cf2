"""Wheel and sdist, installed outside of the checkout into an environment of their own."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import agentstore

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "agentstore": ROOT / "agentstore",
    "agentstore.runtime": ROOT / "runtime",
    "agentstore.tools": ROOT / "tools",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# What pip and build say where there is no index to install from.
OFFLINE = ("No matching distribution found", "Could not find a version", "NewConnectionError", "Temporary failure")


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command as someone who has never seen the checkout; skips where pip's index cannot be reached."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "AGENTSTORE"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode and check:
        output = done.stdout + done.stderr
        if any(text in output for text in OFFLINE) and "CI" not in os.environ:
            pytest.skip(f"pip's index cannot be reached: {output[-200:]}")
        raise AssertionError(f"{command} ended with {done.returncode}:\n{output[-4000:]}")
    return done


def files_of_project() -> list[str]:
    """What a clone has, and what is not committed yet; without git, what this directory has."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and done.stdout:
        return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]
    kept = ("agentstore", "runtime", "tools", "tests", "fuzz", "docs", ".ci")
    inner = [path for folder in kept for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return [str(p.relative_to(ROOT)) for p in [*inner, *ROOT.glob("*.*"), ROOT / "LICENSE"] if p.is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist and the wheel that was built from that sdist."""
    copy = tmp_path_factory.mktemp("a clean copy")
    for name in files_of_project():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, copy, cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a new environment that has the wheel and its base dependencies, and no extra."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, with_pip=True)
    (wheel,) = built.glob("*.whl")
    run(home / "bin" / "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=home)
    return home / "bin"


def names_of_packages() -> set[str]:
    found = set()
    for package, folder in PACKAGES.items():
        for path in folder.rglob("__init__.py"):
            found.add(".".join([package, *path.parent.relative_to(folder).parts]))
    return found


def test_every_package_is_listed() -> None:
    """setuptools installs what is listed and says nothing about the rest."""
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names_of_packages()


def test_every_module_is_in_a_package() -> None:
    for folder in PACKAGES.values():
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_version_is_written_once() -> None:
    assert PROJECT["project"]["version"] == agentstore.__version__


def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("agentstore_wal-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
    tops = {name.partition("/")[0] for name in names}
    assert len(tops) == 2
    assert tops == {"agentstore", metadata_name.partition("/")[0]}
    expected = {
        "/".join([*package.split("."), *path.relative_to(folder).parts])
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
    }
    assert {name for name in names if name.startswith("agentstore/")} == expected | {"agentstore/py.typed"}
    assert any(name.endswith("/LICENSE") for name in names)
    assert metadata["Name"] == "agentstore-wal"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra") or []) >= {"fast", "test"}
    base = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert {line.split(">")[0].split("<")[0].strip() for line in base} == {
        "lmdb",
        "zstandard",
        "cbor2",
        "crcmod",
        "typer",
        "rich",
    }


def test_sdist_holds_the_project(built: Path) -> None:
    (sdist,) = built.glob("agentstore_wal-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in files_of_project() if not name.startswith(".git")}
    assert wanted - names == set()


def test_the_installed_package_is_typed_and_takes_no_names_of_others(installed: Path) -> None:
    script = (
        "import importlib.util, json, pathlib, agentstore, agentstore.runtime, agentstore.tools.cli\n"
        "home = pathlib.Path(agentstore.__file__).parent\n"
        "print(json.dumps({\n"
        "    'home': str(home),\n"
        "    'typed': (home / 'py.typed').exists(),\n"
        "    'runtime': agentstore.runtime.__file__,\n"
        "    'others': [n for n in ('runtime', 'tools', 'tests', 'fuzz', 'codec') if importlib.util.find_spec(n)],\n"
        "}))\n"
    )
    found = json.loads(run(installed / "python", "-I", "-c", script, cwd=installed).stdout)
    assert found["typed"]
    assert found["others"] == []
    assert Path(found["home"]).is_relative_to(installed.parent)
    assert found["runtime"] == f"{found['home']}/runtime/__init__.py"


def test_every_installed_module_imports_without_any_extra(installed: Path) -> None:
    names = [
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
        for package, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__main__.py"
    ]
    assert len(names) > 60
    script = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\nprint('all')"
    assert run(installed / "python", "-I", "-c", script, cwd=installed).stdout == "all\n"


def test_the_installed_command_works(installed: Path, tmp_path: Path) -> None:
    assert agentstore.__version__ in run(installed / "agentstore", "--version", cwd=tmp_path).stdout
    done = run(installed / "agentstore", "ls", "--store", tmp_path / "none", cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert not (tmp_path / "none").exists()


def test_the_installed_demo_survives_its_kills(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "agentstore", "demo", "--kills", "3", "--seed", "1", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["ok"], done.stdout


def test_mypy_follows_the_types_of_the_installed_package(installed: Path, tmp_path: Path) -> None:
    """`py.typed` is there for somebody's type checker; where mypy is not installed, this is not asked."""
    pytest.importorskip("mypy", reason="mypy (extra lint) is not installed")
    program = tmp_path / "program.py"
    program.write_text(
        "from agentstore import Store\n"
        "from agentstore.runtime import Agent\n"
        "with Store.open('x') as store:\n"
        "    reveal_type(store.thread('a').commit())\n"
        "    reveal_type(Agent)\n"
    )
    python = installed / "python"
    done = run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, program, cwd=tmp_path)
    assert 'Revealed type is "agentstore.checkpoint.Checkpoint"' in done.stdout
    assert "agentstore.runtime.agent.Agent" in done.stdout
