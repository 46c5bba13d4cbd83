"""What a trainer's metrics file says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.elastic.checkpoint.metrics import Record, records
from dalsegno.relay.milestones.metrics_file import MetricsFile


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"step": 3, "loss": 1.5}', [Record(1.5, 3)]),
        ('{"global_step": 3, "loss": 2}', [Record(2.0, 3)]),
        ('{"loss": 2}', [Record(2.0, None)]),
        ('{"step": "three", "loss": 2}', [Record(2.0, None)]),
        ('{"step": 3}', []),
        ('{"step": 3, "loss": NaN}', []),
        ('{"step": 3, "loss": Infinity}', []),
        ('{"step": 3, "loss": "low"}', []),
        ('{"step": 3, "loss": true}', []),
        ('{"step": 3, "loss": null}', []),
        (f'{{"loss": 1{"0" * 400}}}', []),
        ("[1, 2]", []),
        ('"loss"', []),
        ("loss", []),
        ("[" * 5000 + '"loss"', []),
        ("", []),
        ("\x00\xff loss", []),
    ],
)
def test_a_line(line: str, found: list[Record]) -> None:
    """What is no number of that name is left out, and stops nothing behind it."""
    text = line.encode() + b'\n{"step": 9, "loss": 0.5}\n'
    assert records(text, "loss") == ([*found, Record(0.5, 9)], len(text))


def test_a_line_that_is_being_written() -> None:
    """It waits for its newline, though it may look whole."""
    whole = b'{"loss": 1}\n'
    assert records(whole + b'{"loss": 0.5', "loss") == ([Record(1.0, None)], len(whole))
    assert records(whole + b'{"loss": 0.5}', "loss") == ([Record(1.0, None)], len(whole))
    assert records(b"", "loss") == ([], 0)


def test_nested_names() -> None:
    """`eval.loss` is a key of that name, or one in another."""
    assert records(b'{"eval": {"loss": 1}}\n{"eval.loss": 2}\n', "eval.loss")[0] == [Record(1, None), Record(2, None)]


@given(st.binary(max_size=300))
def test_any_bytes(text: bytes) -> None:
    """A trainer may write anything there."""
    found, count = records(text, "loss")
    assert count == text.rfind(b"\n") + 1
    assert found == [] or b"loss" in text


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """Each value comes once; a new epoch has a new file; one that was made anew is read anew."""
    file = MetricsFile(Path("logs/metrics.jsonl"), "loss")
    assert file.news(tmp_path) == []
    path = tmp_path / "e1" / "logs" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"loss": 3}\n{"lo')
    assert [one.value for one in file.news(tmp_path)] == [3]
    with path.open("a") as more:
        more.write('ss": 2}\n')
    assert [one.value for one in file.news(tmp_path)] == [2]
    assert file.news(tmp_path) == []
    path.unlink()
    path.write_text('{"loss": 1}\n')
    assert [one.value for one in file.news(tmp_path)] == [1]
    later = tmp_path / "e10" / "logs" / "metrics.jsonl"
    later.parent.mkdir(parents=True)
    later.write_text('{"loss": 0.5}\n')
    (tmp_path / "e9").mkdir()
    assert [one.value for one in file.news(tmp_path)] == [0.5]
    assert file.path(tmp_path) == later


def test_a_line_without_an_end_is_passed_over(tmp_path: Path) -> None:
    """What is as long as that is no line of metrics, and must not hide those behind it for good."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"x" * (9 << 20) + b'\n{"loss": 1}\n')
    file = MetricsFile(path, "loss")
    found = [one.value for _ in range(4) for one in file.news(tmp_path)]
    assert found == [1]
