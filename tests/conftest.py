"""Options and environment of the whole test suite.

`--full` also runs what is marked `full`; `--repeat N` runs every test of `tests/integration` at least N times, where
the cells of a parametrized test count together: a matrix of 48 cells has shown its mechanism 48 times. `--resume FILE`
goes on where an interrupted run stopped: it leaves out what that one has passed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.processes.own_directory import claim, remove_leftovers
from tests.support.forks.forked import SHARED

FORKS = "forks-"
ROOT = Path(__file__).resolve().parents[1]

# Training processes share few cores, and run on the CPU even where there is a GPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if os.environ.get("DALSEGNO_TEST_DEVICE", "cpu") == "cpu":  # else it is `make test-gpu`
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Nobody outside is asked for anything; what a hub that is out of reach costs has a test with one of its own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# DeepSpeed versions that share the default directory break each other.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))

# `nohup` and background jobs of a shell ignore these, and every process started here would inherit that.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

with contextlib.suppress(ImportError):  # `make test-gpu` does without it
    from hypothesis import HealthCheck, settings

    # Process tests share the cores: how long an example takes, or its making, says nothing.
    settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shared cores")


def seed_torch(seed: int) -> None:
    """Before each part of a test, where torch is imported: the one generator that it has on the CPU."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)


with contextlib.suppress(ImportError):  # nor with this one
    import pytest_randomly

    # It would take DeepSpeed's seeder, which imports all of DeepSpeed, and queues seeds for cards that are not there:
    # 2 ms for each part of each test.
    pytest_randomly.entrypoint_reseeds = [seed_torch]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", type=Path, metavar="FILE", help="leave out what passed when this was given before")
    parser.addoption("--full", action="store_true", help="also run the tests marked full")
    parser.addoption(
        "--repeat", type=int, default=1, metavar="N", help="run each process test N times, its cells together"
    )


class Passed:
    """What has passed, one line each in a file; the runs before this one left out.

    Every process of a run has to leave out the same, so what passes in it is noted beside the file until the next.
    """

    def __init__(self, path: Path, *, collects_only: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._news, self._failed = path.with_name(f"{path.name}.news"), set[str]()
        if not collects_only and self._news.exists():
            with path.open("a", encoding="utf-8") as file:
                file.write(self._news.read_text(encoding="utf-8"))
            self._news.unlink()
        self._known = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
        self._collects_only = collects_only

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        deselect(config, items, lambda item: item.nodeid in self._known)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed and not self._collects_only:
            with self._news.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        # Its processes inherit the environment.
        directory = tempfile.TemporaryDirectory(prefix=FORKS)
        claim(Path(directory.name))
        remove_leftovers(Path(directory.name).parent, FORKS)  # of runs that were killed
        os.environ[SHARED] = directory.name
        config.add_cleanup(directory.cleanup)
    if config.getoption("resume"):
        passed = Passed(config.getoption("resume"), collects_only=hasattr(config, "workerinput"))
        config.pluginmanager.register(passed, "passed")


def deselect(config: pytest.Config, items: list[pytest.Item], unwanted: Callable[[pytest.Item], bool]) -> None:
    """Leaves tests out, and has pytest count them."""
    left_out = [item for item in items if unwanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not unwanted(item)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = math.prod(len(mark.args[1]) for mark in metafunc.definition.iter_markers("parametrize"))
    count = math.ceil(metafunc.config.getoption("repeat") / cells)
    if metafunc.definition.get_closest_marker("once") is not None:
        return
    if count > 1 and ROOT / "tests" / "integration" in Path(metafunc.module.__file__ or "").resolve().parents:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count), indirect=True, ids=lambda number: f"run{number + 1}")


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def own_process_state() -> Iterator[None]:
    """What a test leaves in this process is nobody else's.

    Commands that it runs here set up logging, and urllib keeps the proxies that it found first. gRPC's asyncio has a
    thread until the last of its objects is collected, and says a line on standard error at each fork beside that. What
    ranks call before they train is noted for the process, whose first training ends that. A process has one session,
    which tests leave as scripts do. And whoever ends a process ignores signals at last, which programs inherit.
    """
    if noted := sys.modules.get("dalsegno.elastic.rank.way_in"):
        vars(noted.way_in).update(vars(noted.WayIn()))
    if pollers := [thread for thread in threading.enumerate() if "_poll_wrapper" in thread.name]:
        gc.collect()
        for thread in pollers:
            thread.join(5)
    loggers = [logging.getLogger(name) for name in ("dalsegno", "torch.distributed")]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    handled = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in handled.items():
        if handler is not None:  # None: it was not set by Python
            signal.signal(number, handler)
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
    urllib.request.install_opener(None)  # as at the start
    if opened := sys.modules.get("dalsegno.elastic.training.entry"):
        while opened._sessions:
            opened._sessions.pop().close()


@pytest.fixture
def repetition(request: pytest.FixtureRequest) -> int:
    """Which repetition this is, from 0; tests need not ask for it."""
    return int(getattr(request, "param", 0))


def pytest_collection_finish() -> None:
    """What the tests have imported stays, and libraries that collect garbage for each training do not look at it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        deselect(config, items, lambda item: item.get_closest_marker("full") is not None)
