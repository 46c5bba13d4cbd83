"""What the text of a user's script tells an agent."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipapp
from collections.abc import Mapping
from pathlib import Path

import pytest

from dalsegno.agent import script
from dalsegno.agent.script import (
    Script,
    ScriptError,
    asks_hub,
    check_script,
    early_names,
    expects_session,
    knows_us,
    module_file,
    modules_of,
    reads,
)
from dalsegno.agent.set_variables import early_variables
from dalsegno.protos.contract import Variable


@pytest.mark.parametrize(
    ("command", "text", "knows"),
    [
        (["train.py"], "from dalsegno.elastic import session", True),
        (["train.py"], "from dalsegno.swift_plugin import hf", True),
        (["train.py"], "import deepspeed", False),
        (["-m", "swift.cli.sft"], "", True),
        (["train.py", "--external_plugins", "a/dalsegno_swift_plugin.py"], "", True),
        (["-m", "dalsegno.swift_plugin.sft"], "", False),
    ],
)
def test_who_needs_no_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], text: str, knows: bool
) -> None:
    """What reads the environment, and ms-swift, which takes no flag that it does not know; our entry knows it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    assert knows_us(Script(sys.executable, ("-u", *command))) is knows


@pytest.mark.parametrize("command", [("train.py",), ("-m", "train")])
def test_a_script_with_the_documented_line_is_told_of_universal_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """It is not warned that it is not told."""
    monkeypatch.chdir(tmp_path)
    script = Path("train.py")
    found = []
    for load_universal in ('os.environ.get("DALSEGNO_RESUME_FORM") == "universal"', "True"):
        script.write_text(f'config["checkpoint"] = {{"load_universal": {load_universal}}}\n', encoding="utf-8")
        found.append(reads(Script(sys.executable, ("-u", *command)), Variable.RESUME_FORM))
    assert found == [True, False]


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import mine", "mine.py"),
        ("from mine import train", "mine/__init__.py"),
        ("from src.mine import (\n    Config,\n    train,\n)", "src/mine.py"),
        ("from src import data, mine", "src/mine.py"),
        ("from src import (  # ours\n    data,\n    mine,\n)", "src/mine.py"),
    ],
)
@pytest.mark.parametrize("where", ["beside", "in the working directory", "in PYTHONPATH"])
def test_a_script_is_what_its_own_modules_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, module: str, where: str
) -> None:
    """Most projects have a short script and their training elsewhere."""
    root = tmp_path / "project"
    script = (root if where == "beside" else root / "bin") / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(line)
    (root / module).parent.mkdir(exist_ok=True)
    (root / module).write_text("from transformers import Trainer\nfrom dalsegno.swift_plugin import hf\n")
    monkeypatch.setenv("PYTHONPATH", str(root) if where == "in PYTHONPATH" else "")
    monkeypatch.chdir(root if where == "in the working directory" else tmp_path)
    found = Script(sys.executable, ("-u", str(script)))
    assert "transformers" in modules_of(script)
    assert expects_session(found)
    assert knows_us(found)


def test_libraries_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they import is not what the script needs."""
    for name in ("transformers", "other"):
        (tmp_path / "site-packages" / name).mkdir(parents=True)
        (tmp_path / "site-packages" / name / "__init__.py").write_text("import deepspeed")
    script = tmp_path / "train.py"
    script.write_text("import transformers, other\nimport other\nimport missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site-packages'}:{tmp_path / 'nowhere'}")
    assert "transformers" in modules_of(script)
    assert "deepspeed" not in modules_of(script)


@pytest.mark.parametrize(
    ("files", "how", "left_out"),
    [
        (["proj/datasets/__init__.py"], "script", {"datasets"}),
        (["proj/datasets.py", "proj/peft/__init__.py"], "script", {"datasets", "peft"}),
        (["proj/datasets/files.txt", "proj/transformers/docs/__init__.py"], "script", set()),
        (["datasets/__init__.py", "proj/__init__.py"], "script", set()),
        (["datasets/__init__.py", "proj/__init__.py"], "module", {"datasets"}),
        (["proj/datasets/__init__.py"], "module", set()),
        (["proj/torch.py"], "script", {"torch"}),
        (["proj/deepspeed/__init__.py"], "script", {"deepspeed"}),
        (["proj/transformers/__init__.py"], "script", {"transformers", "deepspeed"}),
        (["proj/datasets/__init__.py", "proj/other-1.dist-info/RECORD"], "script", set()),
        (["code/datasets/__init__.py"], "PYTHONPATH", set()),
        (["proj/datasets/__init__.py"], "PYTHONSAFEPATH", {"datasets"} if sys.version_info < (3, 11) else set()),
        (["proj/dalsegno/elastic/__init__.py"], "script", set()),
    ],
)
def test_what_is_the_users_own_is_not_imported_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], how: str, left_out: set[str]
) -> None:
    """As Python finds it from where the script is; an installed package comes before a folder with no Python in it."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    named = ("transformers", "datasets", "peft", "dalsegno.elastic")
    script = tmp_path / "proj" / "train.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text("".join(f"import {name}\n" for name in named))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code") if how == "PYTHONPATH" else "")
    if how == "PYTHONSAFEPATH":
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    found = {name.rstrip("?").partition(".")[0] for name in modules_of("proj.train" if how == "module" else script)}
    everything = {"torch", "transformers", "datasets", "peft", "dalsegno", "deepspeed"}
    assert found == everything - left_out


@pytest.mark.parametrize("name", ["transformers", "deepspeed"])
def test_a_clone_of_a_library_in_pythonpath_is_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is imported ahead, and its text tells nothing of the script."""
    clone = tmp_path / "clone" / name
    clone.mkdir(parents=True)
    (clone / "__init__.py").write_text(
        f"HF_ENDPOINT = ''\nfrom {name} import (" + "".join(f"m{n}, " for n in range(150)) + ")"
    )
    for number in range(150):
        (clone / f"m{number}.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text(f"import transformers, {name}\nimport {name}\nimport mine")
    (tmp_path / "mine.py").write_text("from dalsegno.elastic import session")
    monkeypatch.setenv("PYTHONPATH", str(clone.parent))
    found = Script(sys.executable, ("-u", str(script)))
    assert name in modules_of(script)
    assert expects_session(found)
    assert asks_hub(found)


def test_nothing_is_imported_ahead_for_a_library_that_is_the_users(tmp_path: Path) -> None:
    """What others have for it would import it: then all ranks would start cold."""
    script = tmp_path / "train.py"
    script.write_text("import deepspeed\nimport dalsegno.elastic")
    assert "dalsegno.elastic.deepspeed?" in modules_of(script)
    (tmp_path / "deepspeed.py").write_text("")
    assert [name for name in modules_of(script) if "deepspeed" in name] == []
    assert "dalsegno.elastic" in modules_of(script)


def test_ones_own_files_are_read_before_what_lies_deep_in_others(tmp_path: Path) -> None:
    """Else a large package that is named last would leave no room for them."""
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "__init__.py").write_text("from zoo import (" + ", ".join(f"m{n}" for n in range(150)) + ")")
    for number in range(150):
        (tmp_path / "zoo" / f"m{number}.py").write_text("")
    (tmp_path / "mine.py").write_text("from dalsegno.elastic import session")
    (tmp_path / "train.py").write_text("import zoo\nimport mine")
    assert expects_session(Script(sys.executable, ("-u", str(tmp_path / "train.py"))))


def test_ones_own_package_is_read_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports is what the script needs."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("from dalsegno.elastic import session")
    (tmp_path / "train.py").write_text("import datasets")
    monkeypatch.chdir("/")
    assert expects_session(Script(sys.executable, ("-u", str(tmp_path / "train.py"))))


@pytest.mark.parametrize(
    "line", ["from transformers import Trainer", "import accelerate", "from swift import sft_main"]
)
def test_what_accelerate_looks_at_is_imported_before(tmp_path: Path, line: str) -> None:
    """Each new process would import DeepSpeed as it makes its Trainer, which takes 0.2 s, where that is installed."""
    (tmp_path / "train.py").write_text(line)
    assert "deepspeed?" in modules_of(tmp_path / "train.py")
    assert "deepspeed" not in modules_of(tmp_path / "train.py")


def test_places_that_cannot_be_searched_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs as it would with Python alone: from the root, with odd names and odd entries."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text(f"from . import work\nfrom .. import more\nimport {'a' * 300}\n")
    (package / "work.py").write_text("import transformers")
    script = tmp_path / "train.py"
    script.write_text("from mine import work")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'file'}:{tmp_path / 'closed'}")
    monkeypatch.chdir("/")
    denied = Path.is_file

    def is_file(path: Path) -> bool:
        if path.is_relative_to(tmp_path / "closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return denied(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert "transformers" in modules_of(script)


def test_many_modules_are_read(tmp_path: Path) -> None:
    """Up to a hundred of them, whatever their number: those that are named last, too, where there are fewer."""
    names = [f"m{number}" for number in range(98)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("import dalsegno.elastic" if name == "m97" else "")
    script = tmp_path / "train.py"
    script.write_text("\n".join(f"import {name}" for name in names) + "\nfrom a import (b\n" * 20000)
    assert expects_session(Script(sys.executable, ("-u", str(script))))
    for number in range(98, 120):
        (tmp_path / f"m{number}.py").write_text("import dalsegno.elastic")
        names.append(f"m{number}")
    other = tmp_path / "other.py"
    other.write_text("\n".join(f"import {name}" for name in names))
    assert expects_session(Script(sys.executable, ("-u", str(other))))


def test_a_directory_and_an_archive_run_as_python_runs_them(tmp_path: Path) -> None:
    """No standby worker becomes one; of a directory it is known what its script does."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("from dalsegno.elastic import session")
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    (tmp_path / "app.py").write_text("print()")
    names = [str(tmp_path / name) for name in ("app", "app.pyz", "app.py")]
    for name in names:
        check_script(name, module=False, no_python=False)
    scripts = [Script(sys.executable, ("-u", name)) for name in names]
    assert [script.adoptable for script in scripts] == [False, False, True]
    assert [script.source for script in scripts] == [tmp_path / "app" / "__main__.py", None, tmp_path / "app.py"]
    assert knows_us(scripts[0])


@pytest.mark.parametrize("name", ["empty", "pipe"])
def test_what_is_no_script_is_refused(tmp_path: Path, name: str) -> None:
    """A pipe would be empty for whoever reads it second: the run would finish without a step."""
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ScriptError, match=r"without a __main__\.py|is not a file: workers are started again"):
        check_script(str(tmp_path / name), module=False, no_python=False)


def test_a_program_of_the_working_directory_is_told_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are looked for in PATH: it is there, and "does not exist"."""
    monkeypatch.chdir(tmp_path)
    Path("s.sh").write_text("#!/bin/sh\n")
    Path("s.sh").chmod(0o755)
    with pytest.raises(ScriptError, match=r"^the program s\.sh is not in PATH: write \./s\.sh$"):
        check_script("s.sh", module=False, no_python=True)
    check_script("./s.sh", module=False, no_python=True)
    Path("s.sh").chmod(0o644)
    for name in ("./s.sh", "s.sh", "none.sh"):
        with pytest.raises(ScriptError, match="does not exist or cannot be executed"):
            check_script(name, module=False, no_python=True)


BROKEN = b"def step(batch:\n    pass\n"


def test_what_is_no_python_is_refused_before_a_worker_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another Python nothing is known, nor of a program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    for path in (Path("bad.py"), Path("bad", "__main__.py")):
        path.write_bytes(BROKEN)
    for name, module in (("bad.py", False), ("bad", False), ("bad", True)):
        with pytest.raises(
            ScriptError, match=r"^the script is no Python \(bad.*\.py, line 1\): '\(' was never closed$"
        ):
            check_script(name, module=module, no_python=False)
    Path("bad.py").chmod(0o755)
    check_script("./bad.py", module=False, no_python=True)
    monkeypatch.setenv("PYTHON_EXEC", "/usr/bin/another")
    check_script("bad.py", module=False, no_python=False)


@pytest.mark.parametrize("name", ["__main__", ".train"])
def test_a_name_of_no_module_is_refused_in_one_line(name: str) -> None:
    """Both were tracebacks."""
    with pytest.raises(ScriptError, match=rf"^there is no module .*\(-m {name}\)$"):
        check_script(name, module=True, no_python=False)


@pytest.mark.parametrize(
    "text",
    [
        b"# coding: latin-1\nname = '\xe9'\n",
        b"\xef\xbb\xbfprint()\r\n",
        b"assert (1, 'always')\nname = '\\d'\n",  # Python warns of both
        b"",
        importlib.util.MAGIC_NUMBER + bytes(12),
    ],
    ids=["latin-1", "with a mark", "warned of", "empty", "compiled"],
)
def test_what_python_runs_is_not_refused(tmp_path: Path, text: bytes) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(text)
    check_script(str(script), module=False, no_python=False)


def test_a_package_comes_before_a_module_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has it. A directory that is no package comes behind."""
    monkeypatch.chdir(tmp_path)
    Path("one").mkdir()
    Path("one", "__main__.py").write_text("")
    Path("one.py").write_bytes(BROKEN)
    assert module_file("one") == Path("one.py")
    assert module_file(f"one.{'n' * 300}") is None
    Path("one", "__init__.py").write_text("")
    assert module_file("one") == Path("one", "__main__.py")
    check_script("one", module=True, no_python=False)


SETS = 'import os\nos.environ["{0}"] = "/big"\nimport torch\nfrom transformers import Trainer\n'


@pytest.mark.parametrize(
    ("text", "names", "left"),
    [
        (SETS.format("HF_HOME"), ["HF_HOME"], {"torch", "deepspeed"}),
        (SETS.format("TRANSFORMERS_VERBOSITY"), ["TRANSFORMERS_VERBOSITY"], {"torch", "deepspeed"}),
        *((SETS.format(name), [], {"torch", "transformers"}) for name in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE")),
        *((SETS.format(name), [], {"torch", "transformers"}) for name in ("TOKENIZERS_PARALLELISM", "WANDB_PROJECT")),
        *((SETS.format(name), [], {"torch", "transformers"}) for name in ("CUDA_VISIBLE_DEVICES", "HF_TOKEN")),
        # It is so already.
        (SETS.format("HF_HUB_OFFLINE"), [], {"torch", "transformers"}),
        (SETS.format("HF_HUB_OFFLINE").replace("/big", "/other"), ["HF_HUB_OFFLINE"], {"torch", "deepspeed"}),
        (
            'import os\nos.environ.setdefault("HF_HUB_OFFLINE", "1")\nimport transformers\n',
            [],
            {"torch", "transformers"},
        ),
        # Nothing that reads it is imported ahead.
        ('import os\nos.environ["HF_HOME"] = "/big"\nimport torch\n', [], {"torch"}),
        # Its own process has read it by then, too.
        ('import os\nimport transformers\nos.environ["HF_HOME"] = "/big"\n', [], {"torch", "transformers"}),
        ('import os, torch\nos.environ["HF_HOME"] = "/big"\nimport datasets\n', ["HF_HOME"], {"torch"}),
        ('import os\nos.environ.get("HF_HOME")\nimport datasets\n', [], {"torch"}),
        ('import os\ndef set():\n    os.environ["HF_HOME"] = "8"\nimport datasets\n', [], {"torch"}),
        ('import os\nos.environ["HF_HOME"] = (\nimport datasets\n', [], {"torch"}),
    ],
)
def test_what_a_script_sets_before_its_imports_is_not_read_ahead_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, names: list[str], left: set[str]
) -> None:
    """As far as something reads it on its import, which would be over; the rest is imported ahead as always."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "/big")
    monkeypatch.delenv("HF_HOME", raising=False)
    (tmp_path / "train.py").write_text(text)
    assert early_names(tmp_path / "train.py") == names
    tops = {name.rstrip("?").partition(".")[0] for name in modules_of(tmp_path / "train.py")}
    assert tops == left or (not names and left <= tops)


@pytest.mark.parametrize(
    "line",
    [
        'os.environ.setdefault("HF_HOME", "/big")',
        'os.environ.update({"HF_HOME": "/big"}, OTHER="1")',
        'os.environ.update(HF_HOME="/big")',
        'os.environ |= {"HF_HOME": "/big"}',
        'os.environ |= dict(HF_HOME="/big")',
        'os.putenv("HF_HOME", "/big")',
        'from os import environ; environ["HF_HOME"] = "/big"',
        'if True:\n    try:\n        os.environ["A"] = os.environ["HF_HOME"] = "/big"\n    finally:\n        pass',
        "import mine",
    ],
)
def test_it_is_seen_however_a_script_sets_it(tmp_path: Path, line: str) -> None:
    """Also where a module of its own does."""
    (tmp_path / "mine.py").write_text('import os\nos.environ["HF_HOME"] = "/big"\n')
    (tmp_path / "train.py").write_text(f"import os\n{line}\nimport transformers\n")
    assert early_names(tmp_path / "train.py") == ["HF_HOME"]
    assert "transformers" not in modules_of(tmp_path / "train.py")


ONLY_WHERE_IT_LACKS = [
    'if "HF_HOME" not in os.environ:\n    os.environ["HF_HOME"] = "/big"',
    'if not "HF_HOME" in os.environ:\n    os.environ["HF_HOME"] = "/big"',
    'if "HF_HOME" in os.environ:\n    import a\nelse:\n    os.environ["HF_HOME"] = "/big"',
    'if not os.environ.get("HF_HOME"):\n    os.environ["HF_HOME"] = "/big"',
    'if os.environ.get("HF_HOME") is None:\n    os.environ["HF_HOME"] = "/big"',
    'if os.getenv("HF_HOME", "") == "" and a.b:\n    os.environ["HF_HOME"] = "/big"',
    'if (os.getenv("HF_HOME") or os.environ.get("A")) is None:\n    os.environ["HF_HOME"] = "/big"',
    'os.environ["HF_HOME"] = os.environ.get("HF_HOME", "/big")',
    'os.environ["HF_HOME"] = os.environ.get("HF_HOME", default="/big")',
    'os.environ["HF_HOME"] = os.getenv("HF_HOME") or "/big"',
    'os.environ.update(HF_HOME=os.environ["HF_HOME"] if "HF_HOME" in os.environ else "/big")',
]


@pytest.mark.parametrize("line", ONLY_WHERE_IT_LACKS)
def test_what_a_script_sets_only_where_it_lacks_is_no_news_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """It changes nothing then: a line would be false, and its advice has been followed already."""
    (tmp_path / "train.py").write_text(f"import os\n{line}\nimport transformers\n")
    found = []
    for value in (None, "/mine"):
        monkeypatch.delenv("HF_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("HF_HOME", value)
        found.append((early_names(tmp_path / "train.py"), "transformers" in modules_of(tmp_path / "train.py")))
    assert found == [(["HF_HOME"], False), ([], True)]


@pytest.mark.parametrize(
    "line",
    [
        'if os.environ.get("HF_HOME") != "/big":\n    os.environ["HF_HOME"] = "/big"',
        'if "HF_HOME" in os.environ:\n    os.environ["HF_HOME"] = "/big"',
        'if a.b("HF_HOME") not in os.environ:\n    os.environ["HF_HOME"] = "/big"',
        'if "HF_HOME" not in a.environs:\n    os.environ["HF_HOME"] = "/big"',
        'if os.environ.get("HF_HOME").startswith("a") or 1 < 2:\n    os.environ["HF_HOME"] = "/big"',
        'os.environ["HF_HOME"] = os.environ["HF_HOME"] + "/more"',
        'os.environ["HF_HOME"] = os.environ["HF_ENDPOINT"]',
        'os.environ.pop("HF_HOME")\nif "HF_HOME" not in os.environ:\n    os.environ["HF_HOME"] = "/big"',
        'del os.environ["HF_HOME"]\nos.environ.setdefault("HF_HOME", "/big")',
        'os.environ["HF_HUB_OFFLINE"] = "1"\nif os.getenv("HF_HUB_OFFLINE") == "1":\n    os.environ["HF_HOME"] = "8"',
        'load_dotenv()\nif os.getenv("HF_ENDPOINT"):\n    os.environ["HF_HOME"] = "/big"',
        'if os.environ.get("RANK") == "0":\n    os.environ["HF_HOME"] = "/big"',
    ],
)
def test_what_may_change_it_is_news_where_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Whatever its text does not show for certain."""
    monkeypatch.setenv("HF_HOME", "/mine")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    (tmp_path / "train.py").write_text(f"import os\n{line}\nimport transformers\n")
    assert "HF_HOME" in early_names(tmp_path / "train.py")


def test_an_agent_looks_through_a_scripts_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks three times as it starts, and a large text takes half a second. What has changed is looked at anew."""
    monkeypatch.delenv("HF_HOME", raising=False)
    (tmp_path / "train.py").write_text("import transformers\nimport mine\n")
    (tmp_path / "mine.py").write_text("")
    own = tmp_path / "transformers.py"
    looked = []

    def counted(text: str, environment: Mapping[str, str]) -> set[str]:
        looked.append(text)
        return early_variables(text, environment)

    def asked() -> list[str]:
        looked.clear()
        names = [early_names(tmp_path / "train.py") for _ in range(2)]
        modules = modules_of(tmp_path / "train.py")
        assert names == [names[0]] * 2
        assert any("transformers" in name for name in modules) is not bool(names[0] or own.exists())
        return names[0]

    monkeypatch.setattr(script, "early_variables", counted)
    assert (asked(), len(looked)) == ([], 2)
    assert (asked(), len(looked)) == ([], 0)
    (tmp_path / "mine.py").write_text('import os\nos.environ["HF_HOME"] = "/big"\n')
    (tmp_path / "train.py").write_text("import mine\nimport transformers\n")
    assert (asked(), len(looked)) == (["HF_HOME"], 2)
    monkeypatch.setenv("HF_HOME", "/big")
    assert (asked(), len(looked)) == ([], 2)
    own.write_text("")
    assert asked() == []
