"""`make test-gpu` and `make bench-gpu`: the tests of cards, or their benchmark, with a PyTorch that is there.

Makes `build/venv-gpu` on top of the Python that runs this: its packages stay where and as they are, torch above all,
and only what is missing is installed. Needs the standard library and torch. Exit code: that of what was run; 0 where
there is no card, with one line; 2 where something is missing that cannot be installed.
"""

from __future__ import annotations

import argparse
import configparser
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "venv-gpu"
OLDEST = (2, 11)
# Beside what the product itself needs.
TESTS_NEED = ("numpy", "pytest", "pytest-timeout", "setuptools>=64")
# Packages of the PyTorch that is tested, by how they begin: they stay as they are.
KEPT = ("torch", "nvidia", "triton", "numpy")


def main() -> int:
    """Returns the exit code."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.split("\n\n")[1])
    flags.add_argument("--benchmark", action="store_true", help="benchmarks/gpu.py instead of the tests")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what of it is not CUDA's")
    options, rest = flags.parse_known_args()
    wanting = lacks(options.device)
    if wanting:
        print(f"test-gpu: {wanting}: nothing was shown", flush=True)
        return 0
    problem = prepare()
    if problem:
        print(f"test-gpu: {problem}", file=sys.stderr)
        return 2
    return subprocess.run(command(options.benchmark, options.device, rest), env=environment(options.device)).returncode


def lacks(device: str) -> str:
    """Why nothing can be shown here; empty where it can."""
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch (PYTHON=... names the Python that has the CUDA build)"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        return f"torch {torch.__version__} is older than {OLDEST[0]}.{OLDEST[1]}"
    if device == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} of {sys.executable} is no CUDA build (PYTHON=... names one that has it)"
    if device == "cuda" and not torch.cuda.is_available():
        return "no card here"
    return ""


def prepare() -> str:
    """Makes the environment, or completes it; says what is missing."""
    python = HOME / "bin" / "python"
    if not python.exists():
        venv.create(HOME, system_site_packages=True, clear=True)
    # That Python may be an environment itself, and what is in one is not the system's.
    theirs = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    ours = Path(_told(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (ours / "borrowed.pth").write_text("".join(f"{path}\n" for path in theirs))
    # Of what is there already pip asks nobody.
    wanted = needed()
    if _pip(python, *wanted, "--constraint", str(_keep(python))):
        return f"not all of {', '.join(wanted)} is there; a folder of wheels will do: PIP_NO_INDEX=1 PIP_FIND_LINKS=..."
    if _pip(python, "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(ROOT)):
        return "this checkout cannot be installed into build/venv-gpu: see above"
    return ""


def needed() -> list[str]:
    """Requirements that pip has to find or install."""
    listed = configparser.ConfigParser()
    listed.read(ROOT / "setup.cfg")
    own = listed["options"]["install_requires"].split("\n")
    return sorted([*filter(None, own), *TESTS_NEED])


def _keep(python: Path) -> Path:
    """Constraints for pip."""
    listed = "import importlib.metadata as m; [print(d.name + '==' + d.version) for d in m.distributions()]"
    path = HOME / "keep.txt"
    path.write_text("".join(f"{line}\n" for line in _told(python, listed).splitlines() if line.startswith(KEPT)))
    return path


def _pip(python: Path, *arguments: str) -> int:
    line = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*line, *arguments], check=False).returncode


def _told(python: Path, code: str) -> str:
    line = [str(python), "-c", code]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def environment(device: str) -> dict[str, str]:
    """Of what is run. Threads are few: ranks share the cores."""
    own = {"DALSEGNO_TEST_DEVICE": device, "DS_ACCELERATOR": device, "PYTHONPATH": str(ROOT)}
    path = f"{HOME / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"OMP_NUM_THREADS": "2", **os.environ, **own, "PATH": path, "VIRTUAL_ENV": str(HOME)}


def command(benchmark: bool, device: str, rest: Sequence[str]) -> list[str]:
    """What is run, in the environment."""
    python = str(HOME / "bin" / "python")
    if benchmark:
        return [python, "-m", "benchmarks", "gpu", f"--device={device}", *rest]
    tests = [f"--rootdir={ROOT}", "-c", str(ROOT / "setup.cfg"), "-p", "no:cacheprovider", "--durations=10", "-v"]
    return [python, "-m", "pytest", *tests, str(ROOT / "tests" / "gpu"), *rest]


if __name__ == "__main__":
    sys.exit(main())
