"""`dalsegno doctor`: checks the installation or, if it is given a script, the training before its first step.

Without a script it also removes what killed agents left behind: memory checkpoints, directories of sockets, what Flash
Checkpoint has in both places.

The script runs as it would, by itself or under torchrun, up to its first step, where its session writes down what it
found (`dalsegno.elastic.training.findings`) and ends it. Nothing is saved, and no checkpoint is touched. A script that
does not look as if it had a session would train, and save; so it is not run, unless a person says for how long.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import cast

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.protos.contract import Variable
from dalsegno.protos.options import path_text
from dalsegno.protos.shortage import starting

from ..decisions.events import EXIT_FAILED, EXIT_FINISHED
from ..dlrover import claims, scripts
from ..memory.place import NoMemoryError, remove_leftovers, root_of_user
from ..processes.lifeline import Lifeline
from ..processes.proc import adopt_orphans, end_descendants, kill_group
from ..script import Script, ScriptError, check_script, expects_session, main_file, module_file, text_of
from ..storage.macros import RESUME_DIR, RESUME_PATH, RESUME_STEP, SAVE_DIR, expand
from ..workers.socket_place import sweep
from .installed import outdated_dlrover, version_of

__all__ = ["PARTS", "add_arguments", "doctor"]

_SCRIPTS = ("dlrover-run", "dalsegno-run", "dalsegno", "dlrover-master")
PARTS = {
    "": ("cryptography", "grpcio", "protobuf", "pydantic", "xxhash", "rich"),
    "train": ("torch", "deepspeed", "numpy"),
    "etcd": ("aetcd",),
    "http": ("fastapi", "prometheus-client", "uvicorn"),
    "hf": ("accelerate", "transformers"),
    "swift": ("ms-swift", "transformers"),
    "log": ("tensorboard", "wandb"),
    "deploy": ("PyYAML",),
    "relay": ("fastapi", "httpx", "huggingface_hub", "prometheus-client", "PyYAML", "uvicorn"),
}
# Seconds that a script has to end after it was told to.
_END_WITHIN_SECONDS = 10.0
# Seconds that one with a session has to its first step.
_TIMEOUT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks of the script, under torchrun (default: it alone)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help=f"seconds to the script's first step (default: {_TIMEOUT_SECONDS:.0f}; without a session it is not run)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--dlrover", action="store_true", help="do not run it: say what it uses of dlrover, and what will happen"
    )
    parser.add_argument(
        "script",
        nargs="?",
        type=path_text,
        metavar="SCRIPT",
        help="a training script; none: only the installation",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")


def doctor(options: argparse.Namespace) -> int:
    """Examines, prints, and returns the exit code.

    Raises:
        ValueError: There is nothing to examine.
    """
    if options.script is None:
        if given := [flag for flag, value in _of_a_script(options).items() if value]:
            raise ValueError(f"{', '.join(given)} without a script: name the SCRIPT that is to be examined")
        return _installation()
    try:
        check_script(options.script, module=options.module, no_python=False)
    except ScriptError as error:
        raise ValueError(str(error)) from error
    ranks, timeout_seconds = (1 if value is None else value for value in (options.nproc_per_node, options.timeout))
    if ranks < 1 or not timeout_seconds > 0:
        raise ValueError("--nproc-per-node is at least 1, and --timeout more than 0")
    if options.dlrover:
        if options.module:
            raise ValueError("--dlrover reads a script's file, not a module (-m)")
        return _dlrover(options.script)
    return _examine(options)


def _of_a_script(options: argparse.Namespace) -> dict[str, bool]:
    return {
        "--nproc-per-node": options.nproc_per_node is not None,
        "--timeout": options.timeout is not None,
        "--module": options.module,
        "--dlrover": options.dlrover,
    }


# ---- the installation ------------------------------------------------------------------------------------------------


def _owners() -> dict[str, list[str]]:
    """The installed distributions that declare each of our scripts."""
    owners: dict[str, list[str]] = {name: [] for name in _SCRIPTS}
    for point in importlib.metadata.entry_points(group="console_scripts"):
        distribution = getattr(point, "dist", None)
        if point.name in owners and distribution is not None:
            owners[point.name].append(str(distribution.name))
    return owners


def _installation() -> int:
    trouble = 0
    for script, names in _owners().items():
        where = shutil.which(script) or "not on the PATH"
        print(f"{script}: {where}, of {', '.join(dict.fromkeys(names)) or 'nobody'}")
        if len(set(names)) > 1:
            trouble += 1
            print("  several packages own it, and the last one installed wins; ours is also there as dalsegno-run")
    for extra, names_of in PARTS.items():
        for name in names_of:
            version = version_of(name)
            trouble += not version and not extra
            missing = "missing" + (f" (extra: pip install 'dalsegno[{extra}]')" if extra else "")
            print(f"{name}: {version or missing}")
    for name in (Variable.MASTER, Variable.SOCKET):
        if name in os.environ:
            print(f"{name} is set: {os.environ[name]}")
    _sweep()
    return EXIT_FAILED if trouble else EXIT_FINISHED


def _sweep() -> None:
    """Removes what agents that are gone have left: nobody else would before the next agent starts."""
    try:
        for left in remove_leftovers(root_of_user()):
            print(f"{left.path}: {left.size / 1e6:.0f} MB that an agent which is gone had in memory; removed")
    except NoMemoryError as error:
        print(f"memory checkpoints: {error}")
    for path in sweep():
        print(f"{path}: of an agent that is gone; removed")
    for name in claims.sweep():
        print(f"{name}: sockets and memory of Flash Checkpoint that an agent which is gone has left; removed")


def _dlrover(script: str) -> int:
    """Says what a script uses of DLRover's client library."""
    file = main_file(script)
    if file is None:
        raise ValueError(f"--dlrover reads a script's file, not an archive: {script}")
    found = scripts.uses(text_of(file))
    for line in (*scripts.findings(script, found, version_of("dlrover")), *outdated_dlrover(found)):
        print(line)
    # Which worlds may open is not known here: all that up to four nodes can form.
    for line in scripts.warnings(found, 1, 4, 1):
        print(f"for example with --nnodes=1:4: {line}" if "nodes:" in line else line)
    return EXIT_FAILED if found.of_the_master else EXIT_FINISHED


# ---- a script --------------------------------------------------------------------------------------------------------


def _examine(options: argparse.Namespace) -> int:
    timeout_seconds = _TIMEOUT_SECONDS if options.timeout is None else options.timeout
    file = (module_file(options.script) or _installed(options.script)) if options.module else Path(options.script)
    named = file is not None and expects_session(Script(sys.executable, ("-u", str(file))))
    if options.timeout is None and not named:
        why = "nothing in it names dalsegno.elastic, so it would train and save here, to its end"
        why = why if file is not None else "there is no module of that name, as far as can be told without an import"
        print(f"{options.script} was not run: {why}; `{_typed(options, '--timeout=S')}` runs it for S seconds")
        if file is None:
            return EXIT_FAILED
        print(
            "dlrover-run starts such a script again at each change, like torchrun; let it save below '${save_dir}', "
            "and what it saves is the run's (docs/scripts.md)"
        )
        return EXIT_FAILED
    with tempfile.TemporaryDirectory(prefix="dalsegno-doctor-") as directory:
        values: dict[str, str | None] = dict.fromkeys((RESUME_DIR, RESUME_PATH, RESUME_STEP))
        values[SAVE_DIR] = str(Path(directory) / "saved")
        command = _command(options, expand(options.arguments, values))
        code, lines = _run(command, Path(directory), timeout_seconds)
    for line in lines:
        print(printable(line))
    if lines and code == 0:
        return EXIT_FINISHED
    if code is None:
        print(f"{options.script} made no step within {timeout_seconds:.0f} s (--timeout): it was ended")
    elif code:
        torchrun = f"; if it lacks RANK, it needs torchrun: `{_typed(options, '--nproc-per-node=1')}`"
        alone = "" if options.nproc_per_node else torchrun
        print(f"{options.script} failed before its first step, with exit code {code}: its own lines say why{alone}")
    else:
        print(
            f"{options.script} ended without session().steps(): dlrover-run starts such a script again at each change, "
            "like torchrun, and where it goes on is its own affair"
        )
    return EXIT_FAILED


def _typed(options: argparse.Namespace, flag: str) -> str:
    """The command that was given, with one more flag of ours: it must stand before the script's name."""
    ranks = [f"--nproc-per-node={options.nproc_per_node}"] if options.nproc_per_node else []
    timeout = [f"--timeout={options.timeout:g}"] if options.timeout is not None else []
    module = ["-m"] if options.module else []
    words = ["dalsegno", "doctor", *ranks, flag, *timeout, *module, options.script, *options.arguments]
    return printable(shlex.join(words))


def _installed(name: str) -> Path | None:
    """The file of a module that `-m` runs from elsewhere; None: none was found. Imports nothing, not even packages."""
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None  # no package
    if path is not None:
        spec = _spec(f"{name}.__main__", path)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """As importlib finds it, which imports the package of a module for that."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        with contextlib.suppress(Exception):  # of a finder that is not ours
            if find is not None and (spec := find(name, path, None)) is not None:
                return cast("ModuleSpec", spec)
    return None


def _command(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    ranks = options.nproc_per_node
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    module = ["-m"] if options.module else []
    return [sys.executable, *torchrun, *module, options.script, *arguments]


def _run(command: list[str], directory: Path, timeout_seconds: float) -> tuple[int | None, list[str]]:
    """Runs the command, with a directory of its own that does not outlive this process.

    Returns the exit code (None: it took too long) and what its session found. No process of it is left afterwards.
    """
    # Orphans become children of this process, even if they have left their process group.
    adopt_orphans()
    found = directory / "findings"
    lifeline = Lifeline()  # for the case that this process is killed
    lifeline.add_path(directory)
    environment = {**os.environ, Variable.DOCTOR: str(found), **lifeline.environment()}
    with starting("the script"):
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    lifeline.add_group(process.pid)
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired), _ended(process):
            code = process.wait(timeout_seconds)
        return code, found.read_text(encoding="utf-8").splitlines() if found.is_file() else []
    finally:
        lifeline.close()
        if left := end_descendants(_END_WITHIN_SECONDS):
            print(f"processes that the script has started do not end: {', '.join(map(str, left))}")


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Behind this it has ended: torchrun ends its ranks when told to; what is left then is killed."""
    try:
        yield
    finally:
        if process.poll() is None:
            kill_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_WITHIN_SECONDS)
        kill_group(process.pid)
        process.wait()
