"""A user's modules that are named like installed ones: a worker gets what Python alone gives the script."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dalsegno.agent.own_modules import first_path
from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.script import Script, modules_of
from dalsegno.agent.standby import hooks
from dalsegno.agent.standby.standby_pool import StandbyPool
from dalsegno.agent.standby.worker_main import Assignment

pytestmark = pytest.mark.timeout(60)

# Stands for installed packages: as in the real ones, some import others, and one is there for those who want it.
INSTALLED = {
    "torch/__init__.py": "import queue",
    "torch/distributed.py": "",
    "torch/_dynamo.py": "",
    "datasets/__init__.py": "WHOSE = 'installed'\ndef load_dataset(): pass",
    "transformers/__init__.py": "import importlib.util\nHAS = importlib.util.find_spec('tqdm') is not None",
    "transformers/trainer.py": "import tqdm",
    "tqdm.py": "WHOSE = 'installed'",
}
OWN = "import os\nWHOSE = 'own'\nRANK = os.environ['RANK']\nclass Mine: pass\n"
# Whether it was forked from a nursery.
FORKED = "'nursery' in ' '.join(sys.orig_argv)"
TELL = f"print(datasets.WHOSE, {FORKED})\n"
MINE = f"import sys, torch\nfrom datasets import Mine\nimport datasets\n{TELL}"
THEIRS = f"import sys, torch\nfrom datasets import load_dataset\nimport datasets\n{TELL}"


class Runs:
    """Runs scripts as plain Python does, and as workers of a pool."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.log = root / "project", root / "standby.log"
        self._monkeypatch = monkeypatch
        self._lifeline = Lifeline()
        # What the pool says to people.
        self.said = list[str]()
        self.installed = root / "lib" / "site-packages"
        self.write(INSTALLED, self.installed)
        self.root.mkdir()
        monkeypatch.chdir(self.root)
        self.paths(self.installed)

    def paths(self, *directories: Path) -> None:
        named = (*directories, *filter(None, [os.environ.get("PYTHONPATH")]))
        self._monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, named)))

    def write(self, files: Mapping[str, str], where: Path | None = None) -> None:
        for name, text in files.items():
            path = (where or self.root) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def plain(self, *words: str) -> str:
        """What the script prints; its last line of errors if it fails."""
        environment = {**os.environ, "RANK": "0"}
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        return (done.stderr if done.returncode else done.stdout).splitlines()[-1].removesuffix(" False")

    def worker(self, *words: str, standby: bool = True, fork: bool = True, early: bool = False) -> str:
        """The same of a worker. `standby`: it comes from a process that has imported ahead; `early`: still does."""
        script = Script(sys.executable, ("-u", *words))
        warm = threading.Event()
        first = first_path(script.source)
        modules = modules_of(script.source)
        self.said = list[str]()
        pool = StandbyPool(
            self._lifeline,
            1,
            modules,
            self.log,
            warm.set,
            fork=fork,
            first=first,
            say=lambda text, warning: self.said.append(text),
        )
        try:
            pool.fill(low_priority=False)
            assert early or warm.wait(30)
            assert early or (pool.warm() == 1) is standby, self.log.read_text()
            out, err = self.root / "out", self.root / "err"
            environment = {**os.environ, "RANK": "0"}
            module = words[0] == "-m"
            own = list(words[1:] if module else words)
            started = pool.start_worker(Assignment(own, module, environment, os.getcwd(), str(out), str(err)))
            if started is None:
                assert not standby
                return self.plain(*words)
            code = started.wait(30)
            said = (err if code else out).read_text().splitlines()[-1]
            return said.removesuffix(f" {standby}")
        finally:
            pool.close()

    def close(self) -> None:
        self._lifeline.close()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    one = Runs(tmp_path, monkeypatch)
    yield one
    one.close()


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize(
    ("files", "words", "whose"),
    [
        ({"proj/train.py": MINE, "proj/datasets/__init__.py": OWN}, ["proj/train.py"], "own"),
        ({"proj/train.py": MINE, "proj/datasets.py": OWN}, ["proj/train.py"], "own"),
        ({"train.py": MINE, "datasets/__init__.py": OWN}, ["-m", "train"], "own"),
        ({"proj/train.py": MINE, "proj/__init__.py": "", "datasets/__init__.py": OWN}, ["-m", "proj.train"], "own"),
        ({"scripts/train.py": THEIRS, "datasets/__init__.py": OWN}, ["scripts/train.py"], "installed"),
        ({"proj/train.py": THEIRS, "proj/datasets/read.me": ""}, ["proj/train.py"], "installed"),
        ({"proj/train.py": THEIRS, "proj/datasets/__init__.py": OWN}, ["-m", "proj.train"], "installed"),
    ],
)
def test_a_worker_gets_the_module_that_python_gets(
    runs: Runs, files: dict[str, str], words: list[str], whose: str, fork: bool
) -> None:
    """The user's own from beside the script, or the installed one where a folder of its name is elsewhere."""
    runs.write(files)
    assert runs.plain(*words) == whose
    assert runs.worker(*words, fork=fork) == whose


def test_a_linked_script_has_its_own_directory_first(runs: Runs) -> None:
    """That of the file, not that of the link."""
    runs.write({"proj/train.py": MINE, "proj/datasets.py": OWN, "links/datasets.py": "WHOSE = 'wrong'"})
    (runs.root / "links" / "train.py").symlink_to("../proj/train.py")
    assert runs.plain("links/train.py") == runs.worker("links/train.py") == "own"


def test_a_module_from_pythonpath_is_found_where_python_finds_it(runs: Runs) -> None:
    """If it asks for its rank as it is imported, the worker imports it again."""
    runs.write({"scripts/train.py": MINE, "code/datasets/__init__.py": OWN})
    runs.paths(runs.root / "code")
    assert runs.plain("scripts/train.py") == runs.worker("scripts/train.py") == "own"
    assert not runs.log.read_text()


def test_an_empty_entry_of_pythonpath_is_the_working_directory(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `PYTHONPATH=$PYTHONPATH:/more` makes one where there was none before."""
    runs.write({"scripts/train.py": MINE, "datasets/__init__.py": OWN})
    monkeypatch.setenv("PYTHONPATH", f":{os.environ['PYTHONPATH']}")
    assert runs.plain("scripts/train.py") == runs.worker("scripts/train.py") == "own"
    assert not runs.log.read_text()


@pytest.mark.parametrize("installed", [True, False])
def test_a_module_from_pythonpath_that_a_library_imports(runs: Runs, installed: bool) -> None:
    """It may be a library, or take an installed one's place: as where Python alone runs the script."""
    name = "tqdm" if installed else "no_such_installed_module"
    text = f"import transformers.trainer\nimport sys, {name}\nprint({name}.WHOSE, {FORKED})\n"
    runs.write({"proj/train.py": text, f"code/{name}.py": OWN if installed else "WHOSE = 'own'\n"})
    runs.write({"transformers/trainer.py": f"import {name}"}, runs.installed)
    runs.paths(runs.root / "code")
    assert runs.plain("proj/train.py") == "own"
    assert runs.worker("proj/train.py") == "own"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know it")
def test_a_safe_path_begins_with_nothing_of_the_scripts(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONSAFEPATH also the script beside a package of its own gets the installed one."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    runs.write({"proj/train.py": THEIRS, "proj/datasets.py": OWN})
    assert runs.plain("proj/train.py") == runs.worker("proj/train.py") == "installed"


@pytest.mark.parametrize("fork", [True, False])
def test_a_module_that_a_library_imports_is_the_scripts(runs: Runs, fork: bool) -> None:
    """The library gets the user's own, as in plain Python; it first runs where its script does."""
    text = f"import transformers.trainer\nimport sys, tqdm, torch\nprint(tqdm.WHOSE, {FORKED})\n"
    runs.write({"proj/train.py": text, "proj/tqdm.py": OWN})
    assert runs.plain("proj/train.py") == "own"
    assert runs.worker("proj/train.py", standby=False, fork=fork) == "own"
    assert runs.worker("proj/train.py", standby=False, fork=fork, early=True) == "own"


def test_a_library_that_only_looks_for_a_module_finds_the_users(runs: Runs) -> None:
    """So nothing stands in the way of its standby workers."""
    text = f"import transformers\nimport sys, torch\nprint(transformers.HAS, {FORKED})\n"
    runs.write({"proj/train.py": text, "proj/tqdm.py": OWN})
    (runs.installed / "transformers" / "trainer.py").write_text("")
    assert runs.plain("proj/train.py") == runs.worker("proj/train.py") == "True"


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize(
    ("name", "standby"), [("random", False), ("argparse", False), ("queue", False), ("chunk", True), ("sndhdr", True)]
)
def test_a_module_named_like_one_of_pythons_is_the_users(runs: Runs, name: str, standby: bool, fork: bool) -> None:
    """If a standby worker, or a library, has imported Python's, none is used."""
    text = f"import torch\nimport sys, {name}\nprint({name}.WHOSE, {FORKED})\n"
    runs.write({"proj/train.py": text, f"proj/{name}.py": OWN})
    assert runs.plain("proj/train.py") == "own"
    assert runs.worker("proj/train.py", standby=standby, fork=fork) == "own"
    line = f"ranks start cold: the script has a module {name} of its own, which only they may import"
    assert runs.said == [line] * (not standby)


@pytest.mark.parametrize("words", [["../proj/train.py"], ["-m", "train"]])
def test_a_worker_with_hooks_gets_the_modules_of_the_script(runs: Runs, words: list[str]) -> None:
    """Also those that are named like Python's own, unless Python has them from its start."""
    text = "import sys, random, queue, encodings\nprint(random.WHOSE, queue.WHOSE, hasattr(encodings, 'WHOSE'))\n"
    runs.write({"proj/train.py": text, "proj/random.py": OWN, "proj/queue.py": OWN, "proj/encodings/__init__.py": OWN})
    where = runs.root / ("proj" if words[0] == "-m" else "cwd")
    where.mkdir(exist_ok=True)
    os.chdir(where)
    assert runs.plain(*words) == "own own"
    assert runs.plain(*hooks.arguments_for(("-u", *words))) == "own own"


def test_a_file_that_came_since_a_worker_waits_is_found(runs: Runs) -> None:
    """Whatever the directory's time says: it may be as coarse as two seconds."""
    text = """
import os, pathlib
from dalsegno.agent.own_modules import take_first_path

take_first_path("proj")
try:
    import late
except ImportError:
    before = os.stat("proj").st_mtime_ns
pathlib.Path("proj/late.py").write_text("WHOSE = 'own'")
os.utime("proj", ns=(before, before))
take_first_path("proj")
import late
print(late.WHOSE)
"""
    runs.write({"proj/train.py": ""})
    assert runs.plain("-c", text) == "own"


@pytest.mark.parametrize("files", [["html/page.txt"], ["time.py"], ["model.py"]])
def test_what_hides_nothing_of_pythons_costs_no_standby_worker(runs: Runs, files: list[str]) -> None:
    """A folder without Python in it, or a name that Python has in its interpreter."""
    text = f"import torch, time, html\nimport sys\nprint(hasattr(html, 'WHOSE'), hasattr(time, 'WHOSE'), {FORKED})\n"
    runs.write({"proj/train.py": text, **{f"proj/{name}": OWN for name in files}})
    assert runs.plain("proj/train.py") == runs.worker("proj/train.py") == "False False"


@pytest.mark.parametrize("beside", ["", "proj/"])
def test_a_clone_of_ours_in_the_way_is_passed_over(runs: Runs, beside: str) -> None:
    """The nursery, and what its workers import of ours, come from where the agent comes from."""
    clone = {f"{beside}dalsegno/{name}.py": "raise SystemExit('of the clone')" for name in ("agent", "elastic")}
    text = f"import sys, dalsegno.elastic.checkpoint as ours\nprint(ours.__file__, {FORKED})"
    runs.write({**clone, "proj/train.py": text})
    from dalsegno.elastic import checkpoint

    assert runs.worker("proj/train.py") == checkpoint.__file__
