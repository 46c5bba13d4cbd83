"""The working directory of an agent that runs for weeks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.workers.working_directory import WorkingDirectory, WorkingDirectoryGoneError


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Path]:
    """A directory in which this process is."""
    before, path = os.getcwd(), tmp_path / "there"
    path.mkdir()
    os.chdir(path)
    try:
        yield path
    finally:
        os.chdir(before)


def test_it_is_entered_again_where_it_was_made_anew(there: Path) -> None:
    """A fresh clone in its place: who was in the old one stayed in nothing."""
    home = WorkingDirectory()
    assert home.enter() == str(there)
    there.rename(there.with_name("old"))
    assert home.enter() == str(there.with_name("old"))
    there.mkdir()
    there.with_name("old").rmdir()
    assert home.enter() == str(there) == os.getcwd()


def test_that_it_is_gone_is_said_with_its_path(there: Path) -> None:
    """It was "No such file or directory", of nothing."""
    home = WorkingDirectory()
    there.rmdir()
    with pytest.raises(
        WorkingDirectoryGoneError, match=r"the working directory .*/there is gone .*: make it again"
    ) as caught:
        home.enter()
    assert caught.value.unfit
