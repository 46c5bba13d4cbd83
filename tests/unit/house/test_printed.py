"""Nothing is printed for people to type that no test runs: commands, code, extras and targets of the Makefile."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import subprocess

import pytest

from tests.integration import test_printed_scenes
from tests.support.pages import printed
from tests.support.pages.printed import Block, Page
from tests.support.pages.printed_code import CODE
from tests.support.pages.printed_commands import COMMANDS, Elsewhere, Scene
from tests.support.pages.sources import ROOT, parsed, product_files

# Blocks that are neither commands nor code, by their first line.
DRAWINGS = {
    "WAITING <-> FORMING (gathering beside the conversion gate -> open) -> RUNNING <-> DRAINING": "phases",
    "worker ──Unix socket, worker.proto──▶ agent ──gRPC, control.proto──▶ master": "who talks to whom",
    "<checkpoint-dir>/": "a tree of files",
    "/dev/shm/dalsegno-<uid>/<job-id>/<id of the agent process>/<run-id>/": "the same in memory",
    "/dev/shm/dalsegno-<uid>/        its owner's alone": "whose it is",
    '{"dalsegno_bundle": 2, "tree": <JSON>': "a file of many tensors",
    '{"version": 2, "name", "job_id", "run_id", "step", "epoch", "generation", "form"': "keys of a manifest",
    '{"do": "world", "epoch": 2': "orders to the companion of DLRover's classes",
    "mark NAME=VALUE     the environment variable that this agent's processes carry": "the keeper's messages",
}
TARGETS = sorted({how.by for how in COMMANDS.values() if isinstance(how, Elsewhere) and "::" not in how.by})
TESTS = sorted({how.by for how in COMMANDS.values() if isinstance(how, Elsewhere) and "::" in how.by})


def test_every_command_is_run() -> None:
    """Each has its row in `tests/support/pages/printed_commands.py`, and each row is printed somewhere."""
    found = printed.commands()
    untested = {command: where for command, where in found.items() if command not in COMMANDS}
    assert not untested, "say in tests/support/pages/printed_commands.py how these are run"
    assert set(COMMANDS) == set(found), "no page prints these any more: drop their rows"


def test_every_block_of_code_is_run() -> None:
    """Each has its one row in `tests/support/pages/printed_code.py`, and each row is of one block."""
    blocks = printed.code()
    for block in blocks:
        rows = [snippet for snippet in CODE if snippet.is_of(block)]
        said = f"say in tests/support/pages/printed_code.py how this is run, once ({block.page}):\n{block.text}"
        assert len(rows) == 1, said
    assert len(CODE) == len(blocks), "a row is of no block"


def test_every_other_block_is_a_drawing() -> None:
    """A command of a program that nobody has heard of, or code that does not parse, does not pass for prose."""
    unknown = [block.first for block in printed.texts() if not block.first.startswith(tuple(DRAWINGS))]
    assert not unknown, "these begin with no program that tests/support/pages/printed.py knows, and are no Python"
    assert len(printed.texts()) == len(DRAWINGS)


def test_every_scene_is_played() -> None:
    """Its test exists; it fails where it leaves out a line."""
    scenes = {how.test for how in COMMANDS.values() if isinstance(how, Scene)}
    assert scenes == {name for name in dir(test_printed_scenes) if name.startswith("test_")}


@pytest.mark.parametrize("test", TESTS)
def test_what_covers_a_command_instead_exists(test: str) -> None:
    """Tests that stand for a command are there."""
    path, name = test.split("::")
    tree = parsed((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_its_targets(target: str) -> None:
    """`make -n` goes through: the target, its prerequisites and its variables exist."""
    line = ["make", "--no-print-directory", "-n", "-C", str(ROOT), *shlex.split(target)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_extra_exists() -> None:
    """`dalsegno[...]` and `.[...]`, wherever a page or a message of the product names one."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    texts = [page.text for page in printed.pages()]
    texts += [(ROOT / path).read_text(encoding="utf-8") for path in product_files()]
    lists = [names for text in texts for names in re.findall(r"(?:dalsegno|'\.)\[([a-z,]+)\]'", text)]
    named = {name for names in lists for name in names.split(",")}
    assert {"train", "hf", "http", "log"} <= named
    assert named <= set(config["options.extras_require"])


def test_pytorch_is_the_one_of_the_makefile() -> None:
    """What the quickstart installs by hand is what `make` installs."""
    (by_hand,) = (shlex.split(command)[2] for command in printed.commands() if command.startswith("pip install torch"))
    assert f"TORCH ?= {by_hand}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_elastic_lines_are_the_example_s() -> None:
    """What the pages add to a plain loop is marked in the examples, call by call."""
    assert unmarked("docs/deepspeed.md", "examples/train.py") == set()
    assert unmarked("README.md", "examples/ddp.py") == set()


def unmarked(page: str, script: str) -> set[str]:
    """Calls of ours that the page's second block has beyond its first, and no line of the script marked `elastic`."""
    plain, elastic = (block.text for block in printed.code() if block.page == page)
    example = (ROOT / script).read_text(encoding="utf-8")
    marked = [line for line in example.splitlines() if "# elastic" in line]
    calls = set(re.findall(r"([\w.]+)\(", elastic)) - set(re.findall(r"([\w.]+)\(", plain))
    ours = {call for call in calls if call.split(".")[0] in ("s", "session", "micro", "state")}
    ours |= {call for call in calls if call[0].isupper()} - {"Gpt"}
    return {call for call in ours if not any(f"{call}(" in line for line in marked)}


# The extractor itself.

PAGE = """
Say `make it`, ``dlrover-run`` or `dlrover-run -x  # so`, or
`pip install
this`, but not `make`.

    A=1 torchrun --y \\
      z    # comment
    # only a comment
    python w.py

- A list,

      dalsegno deep

  goes on.

```sh
pip fenced
```

    x = f()
    python = 3

<pre lang="python">
y = 1 &lt; 2
</pre>

    one -> two

```diff
 a = 1
-b = f(a)
+if a:
+    b = g(a)

 c = b
```
"""


def test_the_extractor_finds_what_a_reader_sees() -> None:
    """Indented and fenced blocks, also in lists; inline code; HTML. Comments are no part of a command."""
    page = Page("page.md", PAGE)
    assert list(printed.inline(page)) == ["make it", "dlrover-run -x # so", "pip install this"]
    blocks = list(printed.blocks(page))
    commands = [printed.logical_lines(block.text) for block in blocks if printed.kind(block) == "commands"]
    assert sorted(commands) == [["A=1 torchrun --y z", "python w.py"], ["dalsegno deep"], ["pip fenced"]]
    assert sorted(block.text.strip() for block in blocks if printed.kind(block) == "python") == [
        "a = 1\nb = f(a)\n\nc = b",
        "a = 1\nif a:\n    b = g(a)\n\nc = b",
        "x = f()\npython = 3",
        "y = 1 < 2",
    ]
    assert [block.text for block in blocks if printed.kind(block) == "text"] == ["one -> two"]


def test_the_extractor_reads_docstrings() -> None:
    """Paragraphs of commands at the margin, and code; not prose, and not what stands below `Args:`."""
    source = '''"""Title.

python a.py      one
torchrun b.py    two

python is a language, and make makes.

s = f()
"""
def g():
    """Does.

    Args:
        x: prose
            deeper

    """
'''
    found = [block for page in printed.docstrings("m.py", source) for block in printed.blocks(page)]
    assert [printed.kind(block) for block in found] == ["commands", "python"]
    assert printed.logical_lines(found[0].text) == ["python a.py", "torchrun b.py"]


def test_an_untested_command_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard can fail."""
    monkeypatch.setattr(
        printed, "pages", lambda: iter([Page("x.md", "    dlrover-run --new\n\nAnd:\n\n    z = f()\n")])
    )
    for test in (test_every_command_is_run, test_every_block_of_code_is_run):
        with pytest.raises(AssertionError, match="say in tests/support"):
            test()
    monkeypatch.setattr(printed, "pages", lambda: iter([Page("x.md", "    frobnicate --all\n")]))
    with pytest.raises(AssertionError, match="no program"):
        test_every_other_block_is_a_drawing()
    assert printed.kind(Block("x.md", "frobnicate --all")) == "text"
