"""What these tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.agent.storage.job_directory import JobDirectory


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    """A job's, prepared."""
    one = JobDirectory(tmp_path / "ck", "job")
    one.prepare()
    return one
