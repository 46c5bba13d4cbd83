"""Runs a container: process 1 of numbers of its own, in a root directory of its own, as the user that the pod names.

The root is put together from this machine's directories of programs, read-only, from what the running interpreter
imports, at the same paths, and from the pod's volumes. So `readOnlyRootFilesystem`, `runAsUser`, `fsGroup`, dropped
capabilities and `allowPrivilegeEscalation` mean what they mean in a cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..hosts import hosts
from ..hosts.hosts import ROOT, Host
from ..hosts.namespaces import Inside, children_of, words_in
from ..jobs.local_processes import seconds_until

__all__ = ["Container", "Image", "Mount", "missing"]

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYSTEM = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr", "/sys")
# Its arguments: the new root, `ro` or `rw` for it, then for each mount how, source and target; `--`; the command.
_ENTER = """
set -e
root=$1 own=$2
shift 2
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir "$root/proc"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
  if [ -L "$2" ]; then cp -P "$2" "$root$3"; shift 3; continue; fi
  if [ ! -e "$root$3" ]; then
    if [ -d "$2" ]; then mkdir -p "$root$3"; else mkdir -p "$(dirname "$root$3")"; : >"$root$3"; fi
  fi
  mount --rbind "$2" "$root$3"
  if [ "$1" = ro ]; then mount -o remount,bind,ro "$root$3"; fi
  shift 3
done
shift
mount -o "remount,$own" "$root"
cd /
exec chroot "$root" "$@"
"""
# `unshare --fork` does not tell the signal that ended its child (util-linux 2.38); a shell does.
_FIRST_CHILD = '"$@"; exit $?'
_PATIENCE = 20.0


def missing() -> str:
    """Why there can be no pods here; empty if there can."""
    if lacking := [tool for tool in ("chroot", "setpriv") if shutil.which(tool) is None]:
        return f"pods need {', '.join(lacking)}: install Debian's coreutils and util-linux"
    return hosts.missing()


@dataclass(frozen=True)
class Image:
    """What stands for an image.

    Attributes:
        programs: the folder that stands first on the path, `/opt/dalsegno/bin`.
        environment: its `ENV`.
        files: by path in the container what lies there.
    """

    programs: Path
    environment: Mapping[str, str]
    files: Mapping[str, Path]

    def variables(self) -> dict[str, str]:
        """All that it sets."""
        return {"PATH": f"/opt/dalsegno/bin:{_PATH}", **self.environment}

    def mounts(self) -> Iterator[Mount]:
        """Its file system: parents before what lies below them."""
        paths = {path: Path(path) for path in _SYSTEM if Path(path).exists()}
        imported = [path for path in sys.path if path.endswith("-packages")]
        places = [sys.prefix, sys.base_prefix, str(ROOT), *imported]
        for place in sorted({os.path.abspath(place) for place in places if place and Path(place).exists()}):
            if not any(place == path or place.startswith(f"{path}/") for path in paths):
                paths[place] = Path(place)
        paths |= {"/opt/dalsegno/bin": self.programs, **self.files}
        for path, source in paths.items():
            yield Mount("ro", source, path)
        yield Mount("rw", Path("/dev"), "/dev")


@dataclass(frozen=True)
class Mount:
    """A directory or file of this machine, `ro` or `rw`, and where the container sees it."""

    how: str
    source: Path
    target: str


class Container:
    """A container that runs from its making on.

    Args:
        host: whose network and host name it has.
        root: an empty directory.
        command: what it runs; looked up on its path.
        variables: its whole environment.
        mounts: parents before what lies below them.
        security: the `securityContext` of container and pod together.
        log: gets all that it writes.

    Attributes:
        pid: its process 1, seen from outside.
    """

    def __init__(
        self,
        host: Host,
        root: Path,
        command: Sequence[str],
        variables: Mapping[str, str],
        mounts: Sequence[Mount],
        security: Mapping[str, Any],
        log: Path,
    ) -> None:
        root.mkdir()
        own = "ro" if security.get("readOnlyRootFilesystem") else "rw"
        placed = [word for mount in mounts for word in (mount.how, str(mount.source), mount.target)]
        line = ["unshare", "--mount", "--pid", "sh", "-c", _FIRST_CHILD, "sh"]
        line += ["sh", "-c", _ENTER, "sh", str(root), own, *placed, "--", *_rights(security), *command]
        with open(log, "ab") as file:
            self._nsenter = subprocess.Popen(
                words_in(host.pid, line, Path("/")),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._shell = Inside(self._nsenter)
        self.pid = 0
        waited = seconds_until(self._has_started, _PATIENCE)
        assert waited < _PATIENCE, f"no container after {_PATIENCE:.0f} s: {' '.join(command)}"

    def _has_started(self) -> bool:
        """Whether process 1 runs the command, and no longer what prepares it; or has ended."""
        if self.poll() is not None:
            return True
        self.pid = (children_of(self._shell.pid) or [0])[0]
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
            return bool(self.pid) and words[0] not in (b"", b"chroot", b"setpriv") and _ENTER.encode() not in words
        return False

    def poll(self) -> int | None:
        """Its exit code as Kubernetes has it (128 + the signal); None while it runs."""
        code = self._nsenter.poll()
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: int) -> None:
        """Sends process 1 a signal. Without a handler for it nothing happens, but for SIGKILL."""
        if self.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        self._nsenter.wait(_PATIENCE)
        return int(self.poll() or 0)

    def exec(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """A further process in it, with its root, but with the rights of root."""
        root = f"/proc/{self.pid}/root"
        kinds = [f"--{kind}" for kind in ("net", "uts", "mount", "pid")]
        line = ["nsenter", f"--target={self.pid}", *kinds, f"--root={root}", "--", *command]
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _rights(security: Mapping[str, Any]) -> list[str]:
    """The command that gives up what the pod may not have."""
    words = ["setpriv"]
    if (user := security.get("runAsUser")) is not None:
        group = security.get("runAsGroup", 0)
        more = security.get("fsGroup")
        words += [f"--reuid={user}", f"--regid={group}", f"--groups={group if more is None else more}"]
    if security.get("capabilities", {}).get("drop") == ["ALL"]:
        words += ["--bounding-set=-all", "--inh-caps=-all"]
    if security.get("allowPrivilegeEscalation") is False:
        words.append("--no-new-privs")
    return [*words, "--"] if len(words) > 1 else []
