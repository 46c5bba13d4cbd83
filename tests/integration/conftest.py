"""Fixtures of tests with whole jobs: `clusters` makes them and ends them, `undisturbed` knows what they should do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import forked
from tests.support.hub.client import Hub
from tests.support.jobs.cluster import Cluster, Undisturbed
from tests.support.jobs.programs import Programs
from tests.support.jobs.shell import Shell

FAILED = pytest.StashKey[bool]()
# Whether it is the first test of its file.
FIRST = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Finds the first test of each file, in whatever order they will run."""
    seen: set[Path] = set()
    for item in sorted(items, key=lambda item: (item.location[1] or 0, item.nodeid)):
        item.stash[FIRST] = item.path not in seen
        seen.add(item.path)


@pytest.fixture(autouse=True)
def executes(repetition: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells what a test starts whether it is executed as a user would (`forked.EXECUTES`).

    It costs seconds each time, all of them imports. So the first test of each file that is marked `executed` does it,
    and with `--full` every test, in its first repetition.
    """
    marked = request.node.stash[FIRST] and request.node.get_closest_marker("executed") is not None
    chosen = marked or request.config.getoption("full")
    monkeypatch.setattr(forked, "EXECUTES", chosen and repetition == 0)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Undisturbed runs, each made once by all pytest processes."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    directory.mkdir(exist_ok=True)
    return Undisturbed(directory)


@pytest.fixture
def clusters(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters (arguments of `Cluster` without the directory); all their processes end with the test."""
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        made.append(Cluster(tmp_path / f"cluster-{len(made)}", **options))
        return made[-1]

    yield make
    if request.node.stash.get(FAILED, True):
        for one in made:
            print(one.diagnosis())
    for one in made:
        one.close()


@pytest.fixture
def programs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Programs]:
    """Starts programs in the test's directory, and ends them; a test that fails shows what they said."""
    one = Programs(tmp_path)
    yield one
    if request.node.stash.get(FAILED, True):
        print(one.diagnosis())
    one.close()


@pytest.fixture
def hang_ups() -> Iterator[None]:
    """SIGHUP, SIGQUIT and SIGINT reach what a test starts, also under nohup or in the background."""
    numbers = (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        # A handler, which no new program inherits: this process stays safe from them.
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Runs commands in the test's directory; nothing of them may be left behind."""
    one = Shell(tmp_path)
    yield one
    one.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    one = Hub(tmp_path / "hub")
    yield one
    one.close()
