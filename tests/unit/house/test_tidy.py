"""The house rules that a machine can check (CONTRIBUTING.md lists them)."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages.sources import ROOT, parsed, product_files

LONGEST_FUNCTION = 70
LONGEST_FILE = 500
# A public function of fewer lines may be documented by its name and types.
SAYS_ITSELF = 6
# Lines that a machine or its user left behind; assembled, so that this file doesn't trip over itself.
PRIVATE = re.compile("|".join(["/" + "root/", "/" + "home/(?!user/)", "/" + "work/", "/" + "Users/", r"\.py" + "env/"]))
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Arguments, modules and names that came with Python 3.11 to 3.13: `python_requires` promises 3.10.
NEWER_ARGUMENTS = {"process_group": {"Popen", "run", "call", "check_call", "check_output"}}
NEWER = {
    "tomllib",
    "asyncio.Runner",
    "asyncio.TaskGroup",
    "asyncio.timeout",
    "contextlib.chdir",
    "datetime.UTC",
    "enum.ReprEnum",
    "enum.StrEnum",
    "enum.verify",
    "hashlib.file_digest",
    "itertools.batched",
    "logging.getLevelNamesMapping",
    "os.process_cpu_count",
    "sys.exception",
    "typing.LiteralString",
    "typing.Never",
    "typing.NotRequired",
    "typing.Required",
    "typing.Self",
    "typing.TypeVarTuple",
    "typing.Unpack",
    "typing.assert_never",
    "typing.dataclass_transform",
    "typing.override",
    "typing.reveal_type",
}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def is_sleep(called: ast.expr) -> bool:
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name == "sleep" and ast.unparse(called) in ("time.sleep", "sleep")


def sleeps(tree: ast.AST) -> Iterator[int]:
    """Lines of blocking sleeps; `asyncio.sleep` is a timer that others run beside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_sleep(node.func):
            yield node.lineno


def swallows(handler: ast.ExceptHandler) -> bool:
    """A broad handler that does nothing."""
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in names)
    return broad and all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body)


def undocumented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Public functions, classes and methods of some length without a docstring.

    A method may carry the documentation of its base, or of a class of this module with a method of the same name.
    """
    known = {
        method.name
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, Function) and ast.get_docstring(method) is not None
    }
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) and is_public(node.name) and not node.bases else []
        for item in (node, *members):
            if not isinstance(item, Function | ast.ClassDef) or (item.end_lineno or 0) - item.lineno < SAYS_ITSELF:
                continue
            inherited = item is not node and item.name in known
            if is_public(item.name) and not inherited and ast.get_docstring(item) is None:
                yield item.lineno, item.name


def closed(tree: ast.Module, imported: ast.Import | ast.ImportFrom) -> bool:
    """Whether all that is used of ``pickle`` are its errors, and unpicklers whose ``find_class`` decides alone."""
    if ast.unparse(imported) != "import pickle":
        return False
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    readers = [kind for kind in kinds if "pickle.Unpickler" in map(ast.unparse, kind.bases)]
    decides = [any(isinstance(item, Function) and item.name == "find_class" for item in kind.body) for kind in readers]
    asks = [node for kind in readers for node in ast.walk(kind) if ast.unparse(node).endswith(".find_class")]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "pickle"]
    used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.value in names]
    others = [name for name in used if name not in ("pickle.Unpickler", "pickle.UnpicklingError")]
    return (
        all(decides)
        and not asks
        and not others
        and len(used) == len(names)
        and used.count("pickle.Unpickler") == len(readers)
    )


def newer(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What the oldest Python that is promised does not have."""
    # A block for type checkers alone is never executed.
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            given = [one.arg for one in node.keywords if called in NEWER_ARGUMENTS.get(one.arg or "", ())]
            names = [f"{called}({one}=)" for one in given]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
        for name in names:
            if (name in NEWER or name.endswith("=)")) and id(node) not in unseen:
                yield node.lineno, name


def untidy(source: str) -> list[str]:
    """What the house rules find in one product file, as `line: finding`."""
    tree = parsed(source)
    lines = source.splitlines()
    found = []
    if len(lines) >= LONGEST_FILE:
        found.append(f"{len(lines)}: the file is too long; split it by meaning")
    if ast.get_docstring(tree) is None and tree.body:
        found.append("1: the module has no docstring")
    for node in ast.walk(tree):
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 >= LONGEST_FUNCTION:
            found.append(f"{node.lineno}: {node.name} is too long")
        if isinstance(node, ast.ExceptHandler) and (node.type is None or swallows(node)):
            found.append(f"{node.lineno}: a bare or swallowing except")
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            # The exception by itself loads nothing: torch.load(weights_only=True) raises it.
            only_error = isinstance(node, ast.ImportFrom) and [name.name for name in node.names] == ["UnpicklingError"]
            if not only_error and PICKLES & {module.split(".")[0] for module in modules} and not closed(tree, node):
                found.append(f"{node.lineno}: no pickle")
        if isinstance(node, ast.keyword) and node.arg == "weights_only" and getattr(node.value, "value", 0) is False:
            found.append(f"{node.lineno}: weights_only=False unpickles")
        if isinstance(node, ast.keyword) and node.arg == "shell" and getattr(node.value, "value", 0) is True:
            found.append(f"{node.lineno}: shell=True")
        if isinstance(node, ast.Attribute) and node.attr == "select" and ast.unparse(node) == "select.select":
            found.append(f"{node.lineno}: select.select refuses descriptors from 1024 on; see protos/ready.py")
    for line in sleeps(tree):
        if "# why" not in lines[line - 1] and "# why" not in lines[line - 2]:
            found.append(f"{line}: a sleep without `# why`; is there an event to wait for?")
    found += [f"{line}: {name} is newer than Python 3.10" for line, name in newer(tree)]
    found += [f"{line}: {name} has no docstring" for line, name in undocumented(tree)]
    found += [f"{n}: unfinished" for n, line in enumerate(lines, 1) if re.search(r"\b(TODO|FIXME|XXX)\b", line)]
    return found


@pytest.mark.parametrize("path", product_files(), ids=str)
def test_product_code_is_tidy(path: Path) -> None:
    """Product code keeps the house rules."""
    assert untidy((ROOT / path).read_text(encoding="utf-8")) == []


def _function(lines: int) -> str:
    return '"""m"""\ndef _f() -> None:\n' + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    "source",
    [
        _function(70),
        '"""m"""\n' + "x = 1\n" * 499,
        "x = 1",
        '"""m"""\nfrom pickle import loads',
        '"""m"""\nimport pickle\npickle.loads(b)',
        '"""m"""\nimport pickle\nread(pickle)',
        '"""m"""\nimport pickle as p',
        '"""m"""\nimport pickle\nclass _R(pickle.Unpickler): ...',
        '"""m"""\nimport pickle\nclass R(pickle.Unpickler):\n    def find_class(self, *n): super().find_class(*n)',
        '"""m"""\nimport pickle\nclass R(pickle.Unpickler):\n    def find_class(self, *n): 1\npickle.Unpickler(f)',
        '"""m"""\ntime.sleep(1)',
        '"""m"""\nfrom time import sleep\nsleep(1)',
        '"""m"""\ntry:\n    f()\nexcept:\n    g()',
        '"""m"""\ntry:\n    f()\nexcept Exception:\n    pass',
        '"""m"""\ndef f():\n' + "    x = 1\n" * 6,
        '"""m"""\nclass _C: ...\nclass D:\n    "doc"\n    def f(self):\n' + "        x = 1\n" * 6,
        '"""m"""\nx = torch.load(p, weights_only=False)',
        '"""m"""\nsubprocess.run(c, shell=True)',
        '"""m"""\nselect.select([fd], [], [], 0)',
        '"""m"""\nsubprocess.Popen(c, process_group=0)',
        '"""m"""\nfrom enum import StrEnum',
        '"""m"""\nimport tomllib',
        '"""m"""\nnow = datetime.UTC',
        '"""m"""\n# TODO later',
    ],
)
def test_a_planted_mess_is_seen(source: str) -> None:
    """Each rule can fail."""
    assert len(untidy(source)) == 1


def test_what_is_tidy_passes() -> None:
    """The rules don't cry wolf."""
    head = '"""m"""\nfrom pickle import UnpicklingError\ndef _f():\n'
    source = head + "    # why: the kernel has no event for this\n    time.sleep(1)\n" + "    x = 1\n" * 60
    assert untidy(source) == []
    only_checked = '"""m"""\nif TYPE_CHECKING:\n    from typing import Self\nmodel = wrap(model, process_group=g)'
    assert untidy(only_checked) == []
    reader = "class _R(pickle.Unpickler):\n    def find_class(self, *names): raise pickle.UnpicklingError"
    assert untidy(f'"""m"""\nimport pickle\n{reader}') == []


def _tracked() -> list[Path]:
    """Text files that git tracks; where the tests run without git, the product's."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    names = done.stdout.split("\0") if done.returncode == 0 else [str(path) for path in product_files()]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_paths_of_a_machine() -> None:
    """Nothing in the repository names a directory of the machine that it was written on."""
    found = []
    for path in _tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if PRIVATE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_a_path_of_a_machine_is_seen() -> None:
    """The search above can fail."""
    assert PRIVATE.search("see /" + "home/somebody/project")
    assert not PRIVATE.search("/var/lib/dalsegno")


def test_pages_that_files_name_are_there() -> None:
    """A comment or a message that sends people to a page sends them to one that exists."""
    missing = [
        f"{path.relative_to(ROOT)}: {page}"
        for path in _tracked()
        if path.name != "CHANGELOG.md"
        for page in re.findall(r"\bdocs/[a-z0-9/-]+\.md", path.read_text(encoding="utf-8", errors="replace"))
        if not (ROOT / page).is_file()
    ]
    assert missing == []
