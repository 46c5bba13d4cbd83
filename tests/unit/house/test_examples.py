"""The examples do what their flags say."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages.sources import ROOT

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "common.py")
# `dlrover-run --universal-checkpoint` hands it to the script, which need not look at it.
HANDED = "universal_checkpoint"


def flags_of(tree: ast.Module) -> set[str]:
    """What a script's parser knows: its own flags, and those that the examples share."""
    found = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name == "add_argument":
            named = [word.value for word in call.keywords if word.arg == "dest"] or call.args
            found |= {str(one.value) for one in named[-1:] if isinstance(one, ast.Constant)}
        elif name == "parser" and isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "common.parser":
            without = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "without"]
            found |= shared(*without)
    return {name.lstrip("-").replace("-", "_") for name in found}


def shared(without: tuple[str, ...] = ()) -> set[str]:
    """The flags that `common.parser` makes."""
    return {action.dest for action in parser(without)._actions} - {"help"}


def parser(without: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """What the examples share."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import common  # type: ignore[import-not-found]  # of the examples' directory
    finally:
        sys.path.pop(0)
    found: argparse.ArgumentParser = common.parser("", without=without)
    return found


@pytest.mark.parametrize(("given", "means"), [("auto", "auto"), ("10", 10), ("0", 0)])
def test_memory_is_saved_to_as_the_page_says(given: str, means: object) -> None:
    """`auto` is one of them."""
    assert parser().parse_args([f"--memory-every={given}"]).memory_every == means
    with pytest.raises(SystemExit):
        parser().parse_args(["--memory-every=often"])


def test_every_example_is_listed() -> None:
    """In the page of the directory."""
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert names == {name for name, target in re.findall(r"\[(\w+\.py)\]\((\S+)\)", page) if name == target}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_flag_of_an_example_is_read(path: Path) -> None:
    """A flag that is accepted and does nothing misleads whoever gives it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert flags_of(tree) - set(read_in(tree)) - {HANDED} == set()


def read_in(tree: ast.Module) -> Iterator[str]:
    """The flags that a script looks at."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("flags", "options"):
            yield node.attr


@pytest.mark.parametrize(
    ("ranks", "given", "said"), [(3, "8", "a multiple of 3"), (16, "8", "16"), (1, "0", "1 ranks")]
)
def test_a_batch_that_ranks_cannot_share_is_refused(
    ranks: int, given: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `relay_sft.py`, whose pods may have other numbers of cards: the batch of all ranks stays the same."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script = pytest.importorskip("relay_sft", exc_type=ImportError)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(sys, "argv", ["relay_sft.py", "--output_dir=out", f"--batch_size={given}"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
