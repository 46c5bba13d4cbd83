"""Conversions for the tests: in this process, or forked from one that has imported torch and DeepSpeed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from dalsegno.elastic.universal import ConversionError, Watch, Wish, convert
from dalsegno.elastic.universal.errors import EXIT_READY

from ..workers.ranks import Rank
from ..workers.zero_runs import worker_environment

MODULE = "dalsegno.elastic.universal"
HALTING = Path(__file__).with_name("halting_converter.py")
Lines = list[dict[str, Any]]


def target_of(source: Path, lease: int = 1) -> Path:
    return source.parent / f"{source.name}.universal.{lease}"


def convert_here(source: Path, target: Path, **options: Any) -> tuple[int, str]:
    """In this process: what would be its exit code, and the message of a failure."""
    upstream = options.pop("upstream", False)
    try:
        convert(source, target, wish=Wish(upstream=upstream), **options)
    except ConversionError as error:
        return error.exit_code, str(error)
    return EXIT_READY, ""


def convert_forked(source: Path, target: Path, *more: str, seconds: float = 60.0) -> tuple[int, Lines]:
    """As an agent runs it: exit code and the lines of standard output, those of bytes aside (a matter of time)."""
    converter = Rank(
        [MODULE, "--source", str(source), "--target", str(target), *more], worker_environment(), module=True
    )
    try:
        code, output = converter.wait(seconds)
    finally:
        converter.close()
    return code, [line for line in lines_of(output) if not {"bytes_done", "bytes_total"} & set(line)]


def convert_halfway(source: Path, target: Path, files: int, *more: str) -> None:
    """Starts a converter, and kills it without a warning once it has finished so many files."""
    converter = Rank(
        [str(HALTING), str(files), "--source", str(source), "--target", str(target), *more], worker_environment()
    )
    try:
        deadline = time.monotonic() + 60
        journal = target / "JOURNAL.jsonl"
        while not journal.exists() or journal.read_bytes().count(b"\n") <= files:
            assert time.monotonic() < deadline, converter.poll()
            assert converter.poll() is None, converter.wait(1)
            time.sleep(0.01)
    finally:
        converter.close()


def lines_of(output: str) -> Lines:
    """The converter's own lines; a forked one has its errors in the same file."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


class Died(BaseException):
    """Ends a conversion in the middle, as a kill would: no handler of ours sees it."""


def die_after(files: int) -> Watch:
    def progress(done: int, total: int) -> None:
        if done == files:
            raise Died

    return Watch(progress=progress)


def assert_equal(one: Any, two: Any, where: str) -> None:
    """Of the same types and values, bit by bit."""
    assert type(one) is type(two), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), where
        assert _bits(one) == _bits(two), where  # what pads a fragment was never set, and may be no number
    elif isinstance(one, dict):
        assert list(one) == list(two), where
        for key in one:
            assert_equal(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            assert_equal(left, right, f"{where}/{index}")
    elif type(one).__module__ == "builtins":
        assert one == two, where


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def files_below(directory: Path) -> list[str]:
    found = [Path(current) / name for current, _, names in os.walk(directory) for name in names]
    return sorted(path.relative_to(directory).as_posix() for path in found)
