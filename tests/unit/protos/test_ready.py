"""Waiting for descriptors, also for those with large numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dalsegno.protos.ready import first_readable, readable, writable
from tests.support.jobs.local_processes import many_open_files

Pipe = tuple[int, int]


@pytest.fixture(params=[0, 1100], ids=["small", "large"])
def pipe(request: pytest.FixtureRequest) -> Iterator[Pipe]:
    """A pipe; its descriptors are larger than the number of files that are open before."""
    with many_open_files(request.param):
        reader, writer = os.pipe()
        assert reader > request.param
        yield reader, writer
        os.close(reader)
        os.close(writer)


def test_something_to_read(pipe: Pipe) -> None:
    reader, writer = pipe
    assert not readable(reader, 0)
    assert not readable(reader, 0.001)
    os.write(writer, b"x")
    assert readable(reader, 0)
    assert readable(reader)


def test_room_to_write(pipe: Pipe) -> None:
    _, writer = pipe
    os.set_blocking(writer, False)
    assert writable(writer, 0)
    assert os.write(writer, bytes(1 << 21)) < 1 << 21
    assert not writable(writer, 0.001)


def test_which_comes_first(pipe: Pipe) -> None:
    reader, writer = pipe
    other, ended = os.pipe()
    os.close(ended)
    assert first_readable(reader, other) == {other}
    os.write(writer, b"x")
    assert first_readable(reader, other) == {reader, other}
    os.close(other)
