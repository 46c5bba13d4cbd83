"""Images without a container engine: a Dockerfile's instructions, carried out on a copy-on-write view of this machine.

What is the same: sh runs every RUN line as it is written, as root, with the image's variables; files land where the
instructions put them; the program is started as the image's user, in its directory, with its variables alone; and
nothing that a line writes is seen outside. What is not: the base is this machine's Debian with its own Python of the
same minor version, not `python:3.11-slim`. So a library of the system that the real base lacks is not missed here. The
folders in which people keep things (`/home`, `/root`, `/tmp`, ...) are empty. The network is this machine's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.hosts.namespaces import Inside
from tests.support.pages.sources import ROOT

__all__ = ["BASE", "Image", "built", "instructions", "missing"]

# The only base that there is here.
BASE = re.compile(r"python:(3\.\d+)-slim( AS (?P<name>\w+))?$")
# An overlay cannot lie below itself: what is written goes to another file system than the root's.
_MEMORY = Path("/dev/shm")
_PYTHON = "/usr/bin/python3"
_EMPTY = ("home", "mnt", "root", "srv", "tmp", "work")
_BUILD_SECONDS = 1500
# Of $1, the layers; $2, its options; the rest is the command.
_ENTER = """
set -e
layers=$1 options=$2; shift 2
mount -t overlay overlay -o "${options}lowerdir=/,upperdir=$layers/upper,workdir=$layers/work" "$layers/view"
mount -t proc proc "$layers/view/proc"
mount --rbind /dev "$layers/view/dev"
for one in dev/shm EMPTY; do
  [ ! -d "$layers/view/$one" ] || mount -t tmpfs -o mode=1777 tmpfs "$layers/view/$one"
done
exec "$@"
""".replace("EMPTY", " ".join(_EMPTY))
_UNSHARE = ("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--")


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def missing(version: str) -> str:
    """Why no image with this Python can be built here; empty if it can."""
    if lacking := [tool for tool in ("unshare", "mount", "chroot", "setpriv") if shutil.which(tool) is None]:
        return f"images need {', '.join(lacking)}: install Debian's util-linux and coreutils"
    if os.geteuid():
        return "images are put together in namespaces, which only root can make"
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    if not Path(_PYTHON).exists():
        return f"no {_PYTHON} here, which stands in for the base image's"
    found = subprocess.run([_PYTHON, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    if found.stdout.strip() != version:
        return f"{_PYTHON} is no Python {version} with venv, as the base image's"
    with tempfile.TemporaryDirectory(dir=_MEMORY) as directory:
        made = subprocess.run(_entering(_layers(Path(directory)), "true"), capture_output=True, text=True, check=False)
    return f"no overlay of the root here: {made.stderr.strip()}" if made.returncode else ""


def _layers(directory: Path) -> Path:
    for name in ("upper", "work", "view"):
        (directory / name).mkdir(parents=True)
    # So that others than root may go through it.
    (directory / "upper").chmod(0o755)
    return directory


def _entering(layers: Path, *command: str, options: str = "") -> list[str]:
    return [*_UNSHARE, "sh", "-c", _ENTER, "sh", str(layers), options, *command]


def _bounded(words: Sequence[str], seconds: int) -> list[str]:
    """The command line that ends them from inside: the first process of a namespace takes all others with it."""
    return ["timeout", "--signal=KILL", str(seconds), *words]


@dataclass
class Image:
    """What the instructions of one stage have come to.

    Attributes:
        layers: the folder of what it has beyond the base: `upper`.
        environment: of its processes.
        user: whose they are, UID:GID.
        directory: where they start.
        entrypoint: the words before those that `docker run` is given.
    """

    layers: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    user: str = "0:0"
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)

    def command(self, words: Sequence[str], variables: Mapping[str, str], *, writable: bool) -> list[str]:
        """The command line that runs words in it."""
        uid, gid = self.user.split(":")
        # As an engine does: the home of a user that is in no list is the root.
        told = {"HOME": "/root" if uid == "0" else "/", **self.environment, **variables}
        inside = ["chroot", str(self.layers / "view"), "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        inside += ["env", f"--chdir={self.directory}", "-i", *(f"{key}={value}" for key, value in told.items()), *words]
        return _entering(self.layers, *inside, options="" if writable else "ro,")

    @contextmanager
    def started(self, *words: str) -> Iterator[Inside]:
        """Within this the image's program runs, as in a pod: nothing but /tmp and /dev/shm can be written."""
        line = self.command([*self.entrypoint, *words], {}, writable=False)
        with subprocess.Popen(
            line, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as outer:
            inner = Inside(outer)
            try:
                yield inner
            finally:
                # The first process of its namespace: with it goes all that it has started.
                inner.kill()
                outer.wait(60)

    def run(self, *words: str, seconds: int = 600) -> subprocess.CompletedProcess[str]:
        """The same, until it ends."""
        line = self.command(_bounded([*self.entrypoint, *words], seconds), {}, writable=False)
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    # ---- instructions -----------------------------------------------------------------------------------------------

    def do(self, name: str, rest: str, stages: Mapping[str, Image], given: Mapping[str, str]) -> None:
        """Carries out one instruction; `given` are build arguments."""
        match name:
            case "ARG":
                key, _, default = rest.partition("=")
                self.arguments[key] = given.get(key, default)
            case "ENV":
                for word in shlex.split(rest):
                    key, _, value = word.partition("=")
                    self.environment[key] = self._expanded(value)
            case "USER":
                self.user = rest
            case "WORKDIR":
                self.directory = rest
            case "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            case "COPY":
                self._copy(shlex.split(rest), stages)
            case "RUN":
                self._run(rest)
            case _:
                raise AssertionError(f"an instruction that nothing here carries out: {name} {rest}")

    def _expanded(self, text: str) -> str:
        known = {**self.arguments, **self.environment}
        return re.sub(r"\$(\w+)", lambda found: known.get(found[1], ""), text)

    def _copy(self, words: list[str], stages: Mapping[str, Image]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = stages[words.pop(0).removeprefix("--from=")].layers / "upper"
        origin, target = words
        ignored = _ignored if source == ROOT else None
        place = self.layers / "upper" / target.lstrip("/")
        shutil.copytree(source / origin.lstrip("/"), place, symlinks=True, ignore=ignored, dirs_exist_ok=True)

    def _run(self, line: str) -> None:
        # Where pip, apt and TLS of this machine find what they need is in variables: an engine's build has its own.
        outside = {
            key: value
            for key, value in os.environ.items()
            if re.match(r"(?i)(pip_|ssl_|\w*_proxy$|requests_ca)", key) and key not in self.arguments
        }
        outside |= {"DEBIAN_FRONTEND": "noninteractive"}
        words = _bounded(["sh", "-c", line], _BUILD_SECONDS)
        command = self.command(words, {**outside, **self.arguments}, writable=True)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"RUN {line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def _ignored(directory: str, names: list[str]) -> set[str]:
    """What `.dockerignore` keeps out: names in the root, or anywhere (`**/NAME`)."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not any("/" in pattern.removeprefix("**/") or "!" in pattern for pattern in patterns), patterns
    at_root = directory.rstrip("/.") == str(ROOT)
    return {name for name in names if f"**/{name}" in patterns or (at_root and name in patterns)}


@contextmanager
def built(dockerfile: Path, **given: str) -> Iterator[Image]:
    """The image of a Dockerfile, from the checkout; `given` are build arguments. It is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="image-", dir=_MEMORY) as directory:
        os.chmod(directory, 0o755)
        stages: dict[str, Image] = {}
        image: Image | None = None
        for number, (name, rest) in enumerate(instructions(dockerfile.read_text(encoding="utf-8"))):
            if name == "FROM":
                base = BASE.match(rest)
                assert base is not None, rest
                image = stages[base["name"] or str(number)] = Image(_layers(Path(directory) / str(number)))
                (bin_ := image.layers / "upper" / "usr" / "local" / "bin").mkdir(parents=True)
                (bin_ / "python").symlink_to(_PYTHON)
                continue
            assert image is not None, "no FROM"
            image.do(name, rest, stages, given)
        assert image is not None, "no FROM"
        yield image
