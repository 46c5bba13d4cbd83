"""What the benchmark of the pause makes of its measurements."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import pause, pause_page, reading_once
from benchmarks.pause import BYTES_EACH, SIZES, TENSORS, Cell, shape
from benchmarks.pause_page import BEGIN, END, Change, draw, grouped, growth, picture, read_changes, table
from dalsegno.agent.decisions.pauses import PARTS


def change(way: str, launcher: str, seconds: float, *, size: int = 16 * 10**6, scene: str = "join") -> Change:
    parts = {"written": seconds / 2, "own mark": seconds / 4, "first step": seconds / 4}
    return Change(way, size, 100, launcher, scene, seconds, seconds, seconds, 0.1, 0, 1.0, parts)


@pytest.mark.parametrize("size", SIZES.values())
@pytest.mark.parametrize("tensors", TENSORS)
def test_a_shape_is_as_large_as_it_is_called(size: int, tensors: int) -> None:
    """Weights and biases are two tensors for each layer, and take the bytes that were asked for."""
    layers, width = shape(size, tensors)
    assert 2 * layers == tensors
    assert layers * (width**2 + width) * BYTES_EACH == pytest.approx(size, rel=0.05)


def test_no_part_is_lost_in_the_table() -> None:
    """Every part has a column, also one that a script marks itself, and the columns sum to the pause."""
    assert {part for own in pause_page.GROUPS.values() for part in own} >= set(PARTS)
    everything = dict.fromkeys((*PARTS, "model built", "a script's own"), 1.0)
    assert sum(grouped(everything).values()) == len(everything)
    assert set(pause_page.COLOURS) == set(pause.WAYS)


def test_the_table_has_both_side_by_side() -> None:
    """Medians of ours; torchrun's of the same framework beside them, also where ours has another way."""
    found = [change("zero1", "ours", 1.0), change("zero1", "ours", 2.0), change("zero1", "ours", 9.0)]
    found += [change("zero1", "torchrun", 20.0), change("zero1-universal", "ours", 4.0), change("ddp", "ours", 1.0)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(found).splitlines()]
    head, rows = lines[0], lines[2:]
    assert {len(row) for row in lines} == {len(head)}
    assert [(row[0], row[head.index("pause")], row[head.index("torchrun")]) for row in rows] == [
        *(("ddp", "**1.00**", ""), ("zero1", "**2.00**", "20.00"), ("zero1-universal", "**4.00**", "20.00"))
    ]
    assert rows[1][head.index("times")] == "10.0"
    assert rows[1][head.index("n")] == "3"


def test_larger_states_stand_beside_the_smallest() -> None:
    """Without the steps, which take a quarter here; those of which nobody knows how long reading takes are left out."""
    small, large = change("ddp", "ours", 1.0), change("ddp", "ours", 4.0, size=10**9)
    others = [change("ddp", "torchrun", 9.0, size=10**9), change("zero1", "ours", 1.0, size=10**9)]
    found = [small, dataclasses.replace(large, read=0.5), change("ddp", "ours", 9.0, size=10**7, scene="kill"), *others]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in growth(found).splitlines()]
    assert lines[2:] == [["ddp", "100", "join", "16", "0.75", "1,000", "3.00", "0.50", "1.50"]]
    assert {len(line) for line in lines} == {9}
    assert len(growth([small, large]).splitlines()) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_reading_once_is_done_by_all_ranks(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no file behind."""
    monkeypatch.setattr(reading_once, "SHARED_MEMORY", tmp_path)
    assert 0 < reading_once.reading_once(10**6, ranks) < 60
    assert not list(tmp_path.iterdir())


def test_the_picture_can_be_drawn() -> None:
    """It is an XML document with a line for each way, also where only one state was measured."""
    sizes = [change("ddp", "ours", 1.0), change("ddp", "ours", 3.0, size=10**9), change("ddp", "torchrun", 30.0)]
    root = ElementTree.fromstring(picture([*sizes, change("zero1", "ours", 2.0, scene="kill")]))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 3
    texts = {element.text for element in root.findall("{http://www.w3.org/2000/svg}text")}
    assert texts & {"ddp", "zero1", "fsdp2"} == {"ddp", "zero1"}, "what is not drawn has no colour to explain"
    ElementTree.fromstring(picture(sizes[:1]))
    with pytest.raises(ValueError, match="nothing was measured"):
        picture([])


def test_what_was_measured_comes_into_the_page(tmp_path: Path) -> None:
    """Through the file of results; the rest of the page stays, and drawing again changes nothing."""
    page, results = tmp_path / "pause.md", tmp_path / "pause.jsonl"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    for one in (change("ddp", "ours", 1.0), change("ddp", "torchrun", 5.0)):
        pause._write(results, one, repeat=0)
    assert pause.main([f"--results={results}", f"--draw={page}"]) == 0
    text = page.read_text()
    assert text.startswith(f"above\n{BEGIN}\n| way |")
    assert text.endswith(f"|\n{END}\nbelow\n")
    assert "old" not in text
    draw(read_changes(results), page)
    assert page.read_text() == text
    assert (tmp_path / "pause.svg").exists()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="measured: begin"):
        draw(read_changes(results), page)


def test_torchrun_runs_once_for_each_framework() -> None:
    """It has no universal way of its own beside DeepSpeed's."""
    flags = argparse.Namespace(
        sizes=[1], tensors=[2], frameworks=["zero1", "zero1-universal"], launchers=["ours", "torchrun"]
    )
    assert pause._cells(flags) == [
        *(Cell("zero1", 1, 2, "ours"), Cell("zero1", 1, 2, "torchrun"), Cell("zero1-universal", 1, 2, "ours"))
    ]
