"""What the project prints for people to type: command lines and Python code, wherever they stand.

Pages are the Markdown files, docstrings of the product, the examples and the benchmarks, and the Makefile's help. A
page prints *blocks* (fenced, indented, ``<pre>``) and *inline code*. Of a block that begins with a program each logical
line is a command; a block that parses is Python; what is neither is a drawing or a format, and has to be named as such.
Inline code is a command if it begins with a program and goes on. A diff is two blocks, before and after.
"""

from __future__ import annotations

import ast
import functools
import html
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from .sources import ROOT, product_files

# What a command may begin with. Whoever prints another one adds it here.
PROGRAMS = (
    *("python", "python3", ".venv/bin/python", "pip", "torchrun", "swift", "make", "openssl"),
    *("dlrover-run", "dalsegno-run", "dlrover-master", "dalsegno"),
    *(
        "(umask",
        "bash",
        "sh",
        "kill",
        "mkdir",
        "cp",
        "cd",
        "export",
        "curl",
        "git",
        "docker",
        "kubectl",
        "ray",
        "sbatch",
        "srun",
    ),
)
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=\S*$")
# Google style: what is indented below such a line is prose.
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Note|Example)s?:$")
_TEXT_LANGUAGES = ("mermaid", "json", "yaml", "text")


@dataclass(frozen=True)
class Page:
    """A text for people. `name` is its path, with a docstring's owner behind a colon."""

    name: str
    text: str


@dataclass(frozen=True)
class Block:
    """Lines set apart on a page, dedented."""

    page: str
    text: str
    language: str = ""

    @property
    def first(self) -> str:
        """Its first line, by which a person finds it."""
        return self.text.strip().splitlines()[0].strip()


@functools.cache
def pages() -> tuple[Page, ...]:
    """Everything that prints for people, in a fixed order; read once."""
    return tuple(_pages())


def _pages() -> Iterator[Page]:
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]:
        yield Page(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    others = [path.relative_to(ROOT) for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    for path in [*product_files(), *sorted(others)]:
        yield from docstrings(str(path), (ROOT / path).read_text(encoding="utf-8"))
    said = re.findall(r"^\t@echo '(make .*)'$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    yield Page("Makefile", textwrap.indent("\n".join(said), "    "))


def docstrings(name: str, source: str) -> Iterator[Page]:
    """The docstrings of one Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Page(name if isinstance(node, ast.Module) else f"{name}:{node.name}", text)


@functools.cache
def blocks(page: Page) -> tuple[Block, ...]:
    """The blocks of one page, from top to bottom of each kind."""
    return tuple(_blocks(page))


def _blocks(page: Page) -> Iterator[Block]:
    yield from _paragraphs(page)
    text = page.text
    for language, body in re.findall(r'<pre(?: lang="(\w+)")?>\n(.*?)</pre>', text, re.DOTALL):
        yield Block(page.name, html.unescape(body), language)
    # What is taken out leaves a word: blocks before and behind it are two.
    text = re.sub(r"<pre.*?</pre>", "taken", text, flags=re.DOTALL)
    for indent, language, body in re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        del indent
        if language == "diff":
            yield Block(page.name, one_side(body, "-"), "python")
            yield Block(page.name, one_side(body, "+"), "python")
            continue
        yield Block(page.name, textwrap.dedent(body), language)
    text = re.sub(r"^( *)```.*?^\1```$", "taken", text, flags=re.DOTALL | re.MULTILINE)
    yield from _indented(page.name, text)


def one_side(diff: str, sign: str) -> str:
    """What stands in a diff before (`sign` is "-") or after it ("+")."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in (sign, " ", "\n"))


def _indented(page: str, text: str) -> Iterator[Block]:
    """What stands four columns deeper than the prose, behind an empty line; a list's prose stands at two."""
    before, block = "", list[str]()
    after_empty = True
    for line in [*text.splitlines(), "end"]:
        deep = line.startswith("    ")
        if deep and (block or (after_empty and not _SECTION.search(before))):
            block.append(line)
        elif block and line.strip():
            yield Block(page, textwrap.dedent("\n".join(block)).strip("\n"))
            block = []
        elif block:
            block.append(line)
        if line.strip() and not block:
            before = line.strip()
        after_empty = not line.strip()


def _paragraphs(page: Page) -> Iterator[Block]:
    """Of a docstring, paragraphs at its margin that are no prose; ruff puts some there."""
    if ".py" in page.name:
        for paragraph in re.split(r"\n\s*\n", page.text):
            block, lines = Block(page.name, paragraph), paragraph.splitlines()
            commands = bool(lines) and all(is_command(line) and _goes_on(line) for line in lines)
            if commands or (not paragraph.startswith(" ") and kind(block) == "python"):
                yield block


def _goes_on(line: str) -> bool:
    """Not a sentence that begins with a program's name."""
    words = line.split()
    return len(words) > 1 and re.match(r"-|…|\S*[./=]", words[1]) is not None


def is_command(line: str) -> bool:
    """Whether a line begins with a program, or with variables for one."""
    words = line.split()
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    return bool(words) and words[0] in PROGRAMS


def logical_lines(block: str) -> list[str]:
    """Commands of a block: continued lines joined, comments and what stands beside them in a column left out."""
    joined = re.sub(r"\\\n\s*", "", block)
    lines = [re.split(r"\s{2,}", re.sub(r"(^|\s)#.*$", "", line).strip())[0] for line in joined.splitlines()]
    return [line for line in lines if line]


def inline(page: Page) -> Iterator[str]:
    """Inline code that is a command."""
    text = re.sub(r"<pre.*?</pre>|^( *)```.*?^\1```$", "", page.text, flags=re.DOTALL | re.MULTILINE)
    for double, single in re.findall(r"``([^`]+)``|`([^`]+)`", text):
        code = " ".join((double or single).split())
        if is_command(code) and " " in code:
            yield code


@functools.cache
def kind(block: Block) -> str:
    """`"python"`, `"commands"` or `"text"`."""
    if block.language in _TEXT_LANGUAGES:
        return "text"
    if block.language == "python":
        return "python"
    lines = logical_lines(block.text)
    if lines and is_command(lines[0]):
        return "commands"
    try:
        tree = ast.parse(block.text)
    except SyntaxError:
        return "text"
    plain = all(isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call) for node in tree.body)
    return "text" if plain else "python"


def commands() -> dict[str, list[str]]:
    """Every command that is printed somewhere, and the pages that print it."""
    found = dict[str, list[str]]()
    for page in pages():
        for block in blocks(page):
            if kind(block) == "commands":
                for line in logical_lines(block.text):
                    found.setdefault(line, []).append(page.name)
        for code in inline(page):
            found.setdefault(code, []).append(page.name)
    return found


def code() -> list[Block]:
    """Every block of Python code that is printed somewhere."""
    return [block for page in pages() for block in blocks(page) if kind(block) == "python"]


def texts() -> list[Block]:
    """Every block without a language of its own that is neither commands nor code."""
    found = [block for page in pages() for block in blocks(page) if kind(block) == "text"]
    return [block for block in found if block.language not in _TEXT_LANGUAGES]
