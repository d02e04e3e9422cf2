"""Fixtures that every test file may use, and the settings of hypothesis."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Runs are the same every time, and none fails because the machine was slow. New examples are looked for with
# HYPOTHESIS_PROFILE=explore.
settings.register_profile(
    "tests", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parent.parent
TRANSCRIPTS = ROOT.parent / "shared" / "data" / "open"


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is in a script's background job, and so it would be in the programs that tests send it to.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Nothing is written beside the sources, but the processes that tests start share what one of them compiled.
        directory = tempfile.mkdtemp(prefix="agentstore-bytecode-")
        os.environ["PYTHONPYCACHEPREFIX"] = directory
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    if profile := config.getoption("--hypothesis-profile", default=None):
        settings.load_profile(profile)


@pytest.fixture(scope="session")
def transcripts() -> list[Path]:
    """The recorded transcripts beside the project, one message a line; skips where they are not there."""
    paths = sorted(TRANSCRIPTS.glob("*.jsonl"))
    if not paths:
        pytest.skip(f"the recorded transcripts are not there: {TRANSCRIPTS}")
    return paths


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    """An empty directory for a store, readable by its owner only."""
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    return path
