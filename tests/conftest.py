"""Options and environment of the whole test suite.

`--full` also runs what is marked `full`; `--repeat N` runs every test of `tests/integration` at least N times, where
the cells of a parametrized test count together: a matrix of 48 cells has shown its mechanism 48 times.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Training processes share few cores, and run on the CPU even where there is a GPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed versions that share the default directory break each other.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")
    parser.addoption(
        "--repeat", type=int, default=1, metavar="N", help="run each process test N times, its cells together"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = math.prod(len(mark.args[1]) for mark in metafunc.definition.iter_markers("parametrize"))
    count = math.ceil(metafunc.config.getoption("repeat") / cells)
    if count > 1 and ROOT / "tests" / "integration" in Path(metafunc.module.__file__ or "").resolve().parents:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count), indirect=True, ids=lambda number: f"run{number + 1}")


@pytest.fixture
def repetition(request: pytest.FixtureRequest) -> int:
    """Which repetition this is, from 0; tests need not ask for it."""
    return int(getattr(request, "param", 0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("full"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in set(full)]
