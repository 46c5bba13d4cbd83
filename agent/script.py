"""How a user's script looks from outside: whether it can be run, what its text and its arguments tell.

All guesses of the agent about scripts are here; what it knows of them they say themselves (`worker.proto`).
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .own_modules import first_path, own_places, tops_in
from .set_variables import early_variables

__all__ = [
    "ALWAYS",
    "CAN_RUN_AHEAD",
    "FLAG",
    "Script",
    "ScriptError",
    "asks_for_universal",
    "asks_hub",
    "check_script",
    "dlrover_text",
    "early_names",
    "expects_session",
    "is_archive",
    "knows_us",
    "main_file",
    "module_file",
    "modules_of",
    "reads",
    "refuses_flag",
    "runs_ahead",
    "text_of",
    "uses_dlrover",
    "working_directory",
]

# This flag tells a script to load universal files.
FLAG = "--universal-checkpoint"
# argparse's exit code for arguments that it does not know.
_BAD_ARGUMENTS = 2
# Python 3.10 has paths whose functions cannot be replaced.
CAN_RUN_AHEAD = sys.version_info >= (3, 11)
# The file that is given to ms-swift with --external_plugins.
_SWIFT_PLUGIN = "dalsegno_swift_plugin"

# Imported by the first DDP wrap, which takes seconds on a busy machine.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo")
# Worth importing ahead if the script's text imports them: heavy, and their import does not start CUDA.
_HEAVY = (
    "numpy",
    "deepspeed",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "lightning",
    "torchvision",
    "dlrover",
    "dalsegno.elastic",
    "dalsegno.swift_plugin",
    "swift",
)
# Nobody's own modules, unless they lie beside the script.
_LIBRARIES = {name.partition(".")[0] for name in (*ALWAYS, *_HEAVY)}
# What these modules import only when used, which then takes seconds; "?": silently left out if it is missing.
_LATER = {
    "deepspeed": ("deepspeed.runtime.zero.muon.muon_optimizer?",),
    "dalsegno.elastic": ("dalsegno.elastic.script.session?",),
    # Both packages import nothing by themselves.
    "dlrover": ("dlrover.trainer.torch.elastic.trainer?", "dlrover.trainer.torch.flash_checkpoint.ddp?"),
    # accelerate imports DeepSpeed, where that is installed, to find out whether a model is its engine.
    "transformers": ("transformers.trainer?", "deepspeed?"),
    "accelerate": ("deepspeed?",),
    "dalsegno.swift_plugin": ("dalsegno.swift_plugin.hf.trainer?",),
    "swift": (
        "swift.pipelines.train.sft?",
        "swift.trainers.seq2seq_trainer?",
        "dalsegno.swift_plugin.swift_hooks?",
        "deepspeed?",
    ),
}
# These import nothing of Hugging Face's libraries, which read variables of the hub on their import.
_READ_NO_HUB = ("torch", "numpy", "deepspeed", "dalsegno.elastic")
# These ask Hugging Face's hub for models and data. A script that says where it is, or not to ask, knows better.
_ASK_HUB = frozenset(
    {
        *("huggingface_hub", "transformers", "datasets", "diffusers", "peft", "trl", "sentence_transformers"),
        *("evaluate", "timm", "unsloth", "swift"),
    }
)
_OWN_HUB = re.compile(r"HF_ENDPOINT|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE")
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w.]+)", re.MULTILINE)
# A package, and what is taken out of it, which may be modules.
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]{,4096}\)|[^\n#]*)", re.MULTILINE)
# With these a script imports what its text does not name.
_RUN_OTHERS = frozenset({"__import__", "eval", "exec", "importlib", "pkgutil", "runpy", "site"})
# Most files of one's own that are read for what a script imports.
_MOST_FILES = 100
# Characters of a script that are read to guess what it imports.
_MAX_TEXT = 1 << 20


@dataclass(frozen=True)
class Script:
    """What the workers run, as torch's launcher composes it.

    Attributes:
        entrypoint: the interpreter, or the program with `--no-python`.
        arguments: `("-u", ["-m",] script or module, arguments of its own …)`, or those of the program.
    """

    entrypoint: str
    arguments: tuple[str, ...]

    @property
    def module(self) -> bool:
        """Whether it is run with `-m`."""
        return self.arguments[1:2] == ("-m",)

    @property
    def own(self) -> tuple[str, ...]:
        """The script or module, and its own arguments."""
        return self.arguments[2 if self.module else 1 :]

    @property
    def adoptable(self) -> bool:
        """Whether a standby worker can become it: our interpreter, and a module or a plain file."""
        if not self._is_ours:
            return False
        return self.module or (os.path.isfile(self.own[0]) and not is_archive(self.own[0]))

    @property
    def _is_ours(self) -> bool:
        return self.entrypoint == sys.executable and self.arguments[:1] == ("-u",)

    @property
    def source(self) -> Path | str | None:
        """Where its imports can be found out: the script's file, or the module's name."""
        if not self._is_ours:
            return None
        return self.own[0] if self.module else main_file(self.own[0])


class ScriptError(Exception):
    """There is nothing to run; one line for people."""


def is_archive(name: str) -> bool:
    """Whether Python runs it as an archive of modules (`.pyz`, `.zip`)."""
    try:
        return zipfile.is_zipfile(name)
    except OSError:
        return False


def main_file(name: str) -> Path | None:
    """The source that Python runs for a script's name: of a directory its `__main__.py`; None: it is an archive."""
    path = Path(name, "__main__.py") if os.path.isdir(name) else Path(name)
    return path if os.path.isfile(path) and not is_archive(name) else None


def working_directory() -> str:
    """Where this process is, and its workers will be.

    Raises:
        ScriptError: that is nowhere.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise ScriptError(f"the working directory is gone ({error.strerror}): cd to one that is there") from error


def check_script(name: str, *, module: bool, no_python: bool) -> None:
    """Checks that there is something to run.

    Args:
        name: Name of a file, of a module (`-m`), or of a program (`--no-python`).

    Raises:
        ScriptError: there is nothing to run, or it is no Python; or there is no working directory.
    """
    here = working_directory()
    if no_python:
        if shutil.which(name) is None:
            if shutil.which(f"./{name}") is not None:
                raise ScriptError(f"the program {name} is not in PATH: write ./{name}")
            raise ScriptError(f"the program {name} does not exist or cannot be executed")
    elif module:
        # Only the top-level module, because finding a sub-module would import its parents.
        top = name.partition(".")[0]
        sys.path.insert(0, here)
        try:
            # What runs already is none that a worker could run, and has no place to be found at.
            if top in ("", "__main__") or importlib.util.find_spec(top) is None:
                raise ScriptError(f"there is no module {top} (-m {name})")
        finally:
            sys.path.pop(0)
    elif not os.path.exists(name):
        raise ScriptError(f"the script {name} does not exist (working directory: {here})")
    elif os.path.isdir(name) and main_file(name) is None:
        raise ScriptError(f"the script {name} is a directory without a __main__.py; name a file in it, or use -m")
    elif not os.path.isdir(name) and not os.path.isfile(name):
        raise ScriptError(f"the script {name} is not a file: workers are started again, and each start reads it anew")
    elif not os.access(name, os.R_OK):
        raise ScriptError(f"the script {name} cannot be read")
    if no_python or os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return  # another Python may have another grammar
    source = module_file(name) if module else main_file(name)
    if source is not None and _is_readable(source):
        _check_grammar(source)


def _check_grammar(source: Path) -> None:
    """Without this each worker of each node would fail, and be started again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python says it again when it runs the script
        try:
            text = source.read_bytes()
            if b"\0" not in text:  # compiled ones run, too
                compile(text, source, "exec", dont_inherit=True)
        except SyntaxError as error:
            where = f"{source}, line {error.lineno}" if error.lineno else source
            raise ScriptError(f"the script is no Python ({where}): {error.msg}") from error
        except (OSError, ValueError, RecursionError, MemoryError):
            pass  # Python says what it makes of it


def asks_for_universal(arguments: Sequence[str]) -> bool:
    """Whether the script's own arguments have the flag: as a word, with a value, or in ms-swift's spelling."""
    for number, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in (FLAG, FLAG.replace("-c", "_c")):
            value = value or "".join(arguments[number + 1 : number + 2])
            return value.lower() not in ("false", "0", "no", "off")
    return False


def refuses_flag(code: int) -> bool:
    """Whether a worker that got the flag ended because it does not know it."""
    return code == _BAD_ARGUMENTS


def knows_us(script: Script) -> bool:
    """Whether the script uses our session, which reads the environment and needs no flag.

    Its text says so, or it is ms-swift, with or without our plugin: that program refuses flags that it does not know.
    """
    if _has_plugin(script):
        return True
    if isinstance(script.source, str) and script.source.startswith("swift."):
        return True
    texts = map(text_of, _own_files(script.source))
    return any("dalsegno.elastic" in text or "dalsegno.swift_plugin" in text for text in texts)


def expects_session(script: Script) -> bool:
    """Whether its arguments, or its text and its own modules', say that it may call `session()`.

    If they don't, it still may.
    """
    packages = ("dalsegno.elastic", "dalsegno.swift_plugin")
    return _has_plugin(script) or any(
        name == "dalsegno" or name.startswith(tuple(f"{one}." for one in packages)) or name in packages
        for name in _named_by(script.source)
    )


def _own_files(source: Path | str | None) -> tuple[Path, ...]:
    """The files of a script, or of a module that `-m` runs from the working directory, and of its own modules.

    Those are found beside it, in the working directory and in PYTHONPATH, as far as they are in its text.
    """
    file = module_file(source) if isinstance(source, str) else source
    if file is None or not _is_readable(file):
        return ()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if path and not path.rstrip("/").endswith("-packages")]  # of installed ones
    roots = tuple(Path(path).absolute() for path in ("", *paths))
    key = file.absolute(), roots, frozenset(_LIBRARIES - tops_in(own_places(first_path(source)), _LIBRARIES))
    known = _known.get(key, {})
    if not known or any(_look(one) != look for one, look in known.items()):
        _known.clear()
        known = _known[key] = {one: _look(one) for one in _with_own_modules(*key)}
    return tuple(known)


# The files of the script that was asked for last, and how they looked. An agent asks several times, and each name is
# looked for in each place.
_known: dict[tuple[Path, tuple[Path, ...], frozenset[str]], dict[Path, tuple[int, ...]]] = {}


def _look(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _with_own_modules(script: Path, roots: tuple[Path, ...], libraries: frozenset[str]) -> tuple[Path, ...]:
    seen, left, read = {script}, [script], list[Path]()
    while left and len(read) < _MOST_FILES:
        one = left.pop(0)
        read.append(one)
        names = [name for name in _modules_in(one) if name.partition(".")[0] not in libraries and name.strip(".")]
        near = {
            root.joinpath(*path, end)
            for *path, last in (name.split(".") for name in names)
            for root in (script.parent, one.parent, *roots)
            for end in (f"{last}.py", f"{last}/__init__.py")
            if last
        } - seen
        found = [path for path in sorted(near) if _is_readable(path)]
        seen.update(found)
        left += found
    return tuple(read)


def _is_readable(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):  # a mount that is gone, a directory of somebody else, a name that no file can have
        return False


def module_file(name: str) -> Path | None:
    """The file of a module that `-m` runs from the working directory; None: it is not below that. Imports nothing."""
    base = Path(*name.split("."))
    paths = [base.with_suffix(".py"), base / "__main__.py"]
    if os.path.isfile(base / "__init__.py"):
        paths.reverse()  # a package comes before a module of its name; another directory does not
    return next((path for path in paths if os.path.isfile(path)), None)


def uses_dlrover(script: Script) -> bool:
    """Whether its own text imports DLRover's client library."""
    return _has_dlrover(_named_by(script.source))


def dlrover_text(source: Path | str | None, *, modules: bool = True) -> str:
    """Where a script says how it uses DLRover's client library: its text; if it imports none of it, its modules', too.

    Args:
        source: The script's file, or the name of a module (`-m`).
        modules: Its own modules count, too, where it does not import the library itself.

    Returns:
        Empty where there is no text: an archive, or a module that is not below the working directory.
    """
    files = _own_files(source)
    if not modules or any(_has_dlrover(_named_in(file)) for file in files[:1]):
        return "\n".join(map(text_of, files[:1]))
    # What the files beside these name like its classes is not DLRover's.
    theirs = [file for file in files if _has_dlrover(_named_in(file))]
    return "\n".join(map(text_of, theirs or files[:1]))


def _has_dlrover(names: set[str]) -> bool:
    return any(name.partition(".")[0] == "dlrover" for name in names)


def asks_hub(script: Script) -> bool:
    """Whether it imports a library that asks Hugging Face's hub, itself or by modules of its own from beside it.

    Not if one of them says where the hub is, or that there is none.
    """
    if any(_OWN_HUB.search(text_of(one)) for one in _own_files(script.source)):
        return False
    named = {name.partition(".")[0] for name in _named_by(script.source)} & _ASK_HUB
    return bool(named - tops_in(own_places(first_path(script.source)), named))


def runs_ahead(script: Script, wanted: str) -> bool:
    """Whether a standby worker runs the script up to where it needs its place.

    Args:
        wanted: "auto", "always" or "never". "auto" means only scripts with a session, which resume from what the
            session gives them; any other may look for its last save before it needs its place.
    """
    if not CAN_RUN_AHEAD or not script.adoptable:
        return False
    return wanted == "always" or (wanted == "auto" and expects_session(script))


def reads(script: Script, variable: str) -> bool:
    """Whether the script's text says that it looks this up in its environment by itself."""
    return any(variable in text_of(file) for file in _own_files(script.source)[:1])


def modules_of(script: Path | str | None) -> tuple[str, ...]:
    """The heavy modules to import for a script, as far as its text, and that of its own modules, names them.

    Not those that Python would find beside the script: they are the user's own. Nor what only these would need. And not
    what reads a variable on its import which the script sets before that.

    Args:
        script: Its file; or the name of a module. Of one that is not below the working directory only the name counts,
            because finding its file could need imports. None: neither.
    """
    return _ahead_of(script)[0]


def early_names(script: Path | str | None) -> list[str]:
    """The variables that the script sets before it imports what reads them: that is left out of `modules_of`."""
    return [*_ahead_of(script)[1]]


# What came of the script that was asked for last, by all that it depends on. An agent asks three times as it starts.
_ahead: dict[object, tuple[tuple[str, ...], list[str]]] = {}


def _ahead_of(script: Path | str | None) -> tuple[tuple[str, ...], list[str]]:
    looks = tuple((file, _look(file)) for file in _own_files(script))
    theirs = frozenset(tops_in(own_places(first_path(script)), (*ALWAYS, *_HEAVY)))
    depends = script, looks, theirs, frozenset(os.environ.items())
    if (found := _ahead.get(depends)) is None:
        _ahead.clear()
        found = _ahead[depends] = _read_ahead(script, theirs)
    return found


def _read_ahead(script: Path | str | None, theirs: frozenset[str]) -> tuple[tuple[str, ...], list[str]]:
    if isinstance(script, Path) and _is_plain(script):
        return (), []
    named = _named_by(script)
    wanted = [
        module
        for module in _HEAVY
        if module.partition(".")[0] not in theirs
        and any(name == module or name.startswith(f"{module}.") for name in named)
    ]
    later = [one for module in wanted for one in _LATER.get(module, ())]
    if "deepspeed" in wanted and "dalsegno.elastic" in wanted:
        later.append("dalsegno.elastic.deepspeed?")
    every = tuple(name for name in (*ALWAYS, *wanted, *later) if name.rstrip("?").partition(".")[0] not in theirs)
    early = set[str]().union(*(early_variables(text_of(file), os.environ) for file in _own_files(script)))
    modules = tuple(name for name in every if not early or name.startswith(_READ_NO_HUB))
    return modules, sorted(early) if modules != every else []


def _is_plain(script: Path) -> bool:
    """Whether its text shows that it needs Python's own library only, and runs nobody else's code in its process."""
    try:
        nodes = list(ast.walk(ast.parse(text_of(script))))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    called = {node.id for node in nodes if isinstance(node, ast.Name)}
    return not called & _RUN_OTHERS and all(
        name.partition(".")[0] in sys.stdlib_module_names - _RUN_OTHERS for name in named
    )


def _has_plugin(script: Script) -> bool:
    return any(_SWIFT_PLUGIN in argument for argument in script.own[1:])


def text_of(path: Path) -> str:
    """A script's text, or the beginning of a very long one."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_TEXT)


def _named_by(script: Path | str | None) -> set[str]:
    """What a script, and its own modules, import by their text."""
    named = {script} if isinstance(script, str) else set()
    if isinstance(script, str) and script.startswith("dalsegno.swift_plugin."):
        named.add("swift")  # these run ms-swift
    return named.union(*map(_named_in, _own_files(script)))


def _named_in(file: Path) -> set[str]:
    return set(_IMPORT.findall(text_of(file)))


def _modules_in(file: Path) -> set[str]:
    """The same, and whatever might be a module in a package."""
    taken = {
        f"{package}.{name}" for package, names in _FROM.findall(text_of(file)) for name in re.findall(r"\w+", names)
    }
    return _named_in(file) | taken
