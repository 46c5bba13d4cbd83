"""A name means one thing: no two classes of the product have the same, but for those that are the same thing."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.pages.sources import ROOT, parsed, product_files

# Names of one thing as two packages have it.
SHARED = {
    "Milestone": "what was published, as the record and as the Commander's client have it",
    "Pruned": "what was deleted, as an agent says it and as the record has it",
    "Tick": "time has passed, for an agent and for the master",
}


def same_names() -> dict[str, list[str]]:
    """Public classes at the top level of modules that several modules define, and where."""
    found = defaultdict(list)
    for path in product_files():
        for node in parsed((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.as_posix())
    return {name: places for name, places in found.items() if len(places) > 1}


def test_no_two_classes_have_one_name() -> None:
    """A reader knows which thing is meant, and a name of SHARED has two places."""
    found = same_names()
    assert {name: places for name, places in found.items() if name not in SHARED} == {}
    assert set(SHARED) <= set(found)
