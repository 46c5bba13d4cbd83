"""The demo's page: self-contained, well-formed, and honest about a difference."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from examples.history import compare, epoch_spans, kept_history
from examples.report import Axis, Change, Scene, picture, render
from tests.unit.house.test_history import world


def scene(loss: float | None = None, cause: str = "node-c joined") -> Scene:
    lines = world(1, 2, range(1, 11)) + world(2, 4, range(8, 21), began=14.0)
    kept = kept_history(lines)
    if loss is not None:
        kept[5] = type(kept[5])(**{**kept[5].__dict__, "loss": loss})
    undisturbed = kept_history(world(0, 1, range(1, 21)))
    return Scene(
        title="a <run>",
        command="make demo && true",
        kept=kept,
        undisturbed=undisturbed,
        spans=epoch_spans(lines),
        comparison=compare(kept, undisturbed),
        limit=1e-5,
        changes={2: Change(cause=cause, form="universal")},
        events=((3.0, "two & more nodes join"), (12.0, "node-a is killed")),
    )


def parse(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def test_the_page_is_well_formed_and_self_contained() -> None:
    """Nothing is loaded from anywhere, and text is escaped."""
    page = render(scene(cause="node <b>x</b> & y"))
    tree = parse(page)
    assert not re.search(r"https?:|src=|<script|<link|@import|url\(", page)
    assert "node <b>x</b> & y" in [cell.text for cell in tree.iter("td")]
    assert tree.findtext(".//h1") == "a <run>"


def test_both_curves_have_every_step() -> None:
    """One picture with both curves, a point for each step."""
    lines = {line.get("class"): (line.get("points") or "").split() for line in parse(render(scene())).iter("polyline")}
    assert {name: len(points) for name, points in lines.items()} == {"undisturbed": 20, "ours": 20}
    assert lines["ours"] == lines["undisturbed"]


def test_the_picture_stands_by_itself() -> None:
    """Both curves and why each world began, in one file that any program can draw."""
    drawn = picture(scene())
    tree = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    assert {line.get("class") for line in tree.iter(f"{space}polyline")} == {"undisturbed", "ours"}
    assert "node-c joined: 4 ranks" in [text.text for text in tree.iter(f"{space}text")]
    assert "var(" not in drawn


def test_epochs_and_costs_are_shown() -> None:
    """A bar per epoch, a gap per pause, and the cost in the table."""
    tree = parse(render(scene()))
    assert len([box for box in tree.iter("rect") if box.get("class") == "epoch"]) == 2
    assert len([box for box in tree.iter("rect") if box.get("class") == "pause"]) == 1
    rows = [[cell.text for cell in row.iter("td")] for row in tree.iter("tr")]
    assert rows[2] == ["2", "4", "node-c joined", "7", "universal", "8 to 20", "5.0 s", "3"]


@pytest.mark.parametrize("loss", [1.01, math.nan, math.inf])
def test_a_difference_is_not_called_equal(loss: float) -> None:
    """The verdict follows the comparison, also when a loss is no number."""
    page = render(scene(loss))
    parse(page)
    assert "The runs differ." in page
    assert "The two runs cannot be told apart." in render(scene())


def test_ticks_are_round_and_inside() -> None:
    """Ticks lie within the axis, some are there for any range."""
    for low, high in ((0.0, 1.0), (3.2, 5.4), (1.0, 300.0), (-10.0, -4.0), (2.0, 2.0)):
        ticks = Axis(low, high, 0, 100).ticks(5)
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
        assert ticks or low == high
