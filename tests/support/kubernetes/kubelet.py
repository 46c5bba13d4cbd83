"""What the kubelet does for one pod: its sandbox, its volumes, its container's starts, probes and end."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..hosts.hosts import Host
from .pod_spec import COMPLETION_INDEX, Volume, command_line, environment, port_of, volumes
from .probes import Health, due
from .sandbox import Container, Image, Mount
from .states import Phase, Pod

__all__ = ["Kubelet", "Storage"]

# Seconds before the second restart of a container, doubled with each further one, and their bound.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0


class Storage:
    """Claims, secrets and config maps of a cluster, as folders.

    Args:
        directory: for all of them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: dict[tuple[str, str], dict[str, bytes]] = {}

    def claim(self, name: str) -> Path:
        """The folder of a claim. It stays when its pods go."""
        return self._directory / "claims" / name

    def keep(self, kind: str, name: str, files: Mapping[str, bytes]) -> None:
        """A `secret`, or a `config` map."""
        self._kept[kind, name] = dict(files)

    def has(self, volume: Volume) -> bool:
        """Whether a pod with this volume can start."""
        if volume.kind == "claim":
            return self.claim(volume.source).is_dir()
        return volume.kind in ("scratch", "memory") or (volume.kind, volume.source) in self._kept

    def write(self, volume: Volume, place: Path) -> None:
        """The files of a secret or config map. Raises KeyError if it has no such key."""
        files = self._kept[volume.kind, volume.source]
        for key, path in volume.items or tuple((key, key) for key in files):
            (place / path).write_bytes(files[key])
            (place / path).chmod(volume.mode)


class Kubelet:
    """One pod on its node, from its binding to its end. `tick` moves it on; `pod` is what the API shows.

    Args:
        pod: as its controller made it.
        template: its metadata and specification.
        node: the name of its node.
        directory: of its own; made.
        host: its sandbox.
        image: of its container.
        storage: of the cluster.
        claims: of its StatefulSet, by the names of volumes.
        pace: times the pauses of back-off.
    """

    def __init__(
        self,
        pod: Pod,
        template: Mapping[str, Any],
        node: str,
        directory: Path,
        host: Host,
        image: Image,
        storage: Storage,
        claims: Mapping[str, str],
        pace: float,
    ) -> None:
        self.pod, self.node, self.host = pod, node, host
        self.labels = template["metadata"]["labels"]
        self.spec: Mapping[str, Any] = template["spec"]
        (self.container,) = self.spec["containers"]
        self._directory, self._image, self._pace = directory, image, pace
        self._security = {**self.spec.get("securityContext", {}), **self.container.get("securityContext", {})}
        self._volumes, self._storage = volumes(self.spec, claims), storage
        self._running: Container | None = None
        self._health = Health()
        self._results: list[tuple[str, bool]] = []
        self._asked: set[str] = set()
        self._kill_at: float | None = None
        self._hook: subprocess.Popen[bytes] | None = None
        self._noticed = False
        self._start_at = 0.0
        self.is_lost = False
        self.restarts = -1
        self.started: list[float] = []
        self.codes: list[int] = []

    # ---- what the API asks for -------------------------------------------------------------------------------------

    def delete(self, now: float, grace: float | None = None) -> None:
        """A deletion with the pod's grace, or this one."""
        if self.pod.deleting and grace is None:
            return
        seconds = self.spec.get("terminationGracePeriodSeconds", 30) if grace is None else grace
        self.pod = replace(self.pod, deleting=True, ready=False)
        self._end_container(now, seconds)

    def lose(self) -> None:
        """The pod's machine is gone: the API hears nothing of it any more."""
        self.is_lost = True
        self.host.power_cut()

    @property
    def pid(self) -> int:
        """Process 1 of its container, seen from outside."""
        assert self._running is not None, f"{self.pod.name} has no container"
        return self._running.pid

    @property
    def log(self) -> str:
        """All that its containers wrote."""
        parts = sorted(self._directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in parts)

    @property
    def is_gone(self) -> bool:
        """Whether its object can be removed: it was deleted, and its container has ended."""
        return self.pod.deleting and self.pod.phase.is_terminal

    # ---- its life --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Does what is due."""
        if self.is_lost or self.pod.phase.is_terminal:
            return
        if self._running is None:
            if self.pod.deleting:
                self._finish(Phase.FAILED, 137, now)
            elif now >= self._start_at and all(self._storage.has(volume) for volume in self._volumes):
                self._start(now)
            return
        code = self._running.poll()
        if code is not None:
            self._ended(code, now)
            return
        if self._kill_at is not None:
            self._go_on_ending(now)
        self._probe(self._running, now)

    def cut(self) -> None:
        """Ends its sandbox, and does not wait: namespaces take a second or two to go."""
        if self.host.is_up:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.host.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends all of it, whatever it is doing."""
        self.host.close()
        if self._running is not None:
            self._running.wait()

    def _start(self, now: float) -> None:
        self.restarts += 1
        variables = {
            "HOSTNAME": self.host.name,
            **environment(self.container, self._fields(), self._image.variables()),
        }
        mounts = [*self._image.mounts(), *(self._mounted(volume) for volume in self._volumes)]
        mounts.sort(key=lambda mount: mount.target.count("/"))
        line = command_line(self.container, variables)
        root, log = self._directory / f"root-{self.restarts}", self._directory / f"{self.restarts}.log"
        self._health, self._noticed, self._kill_at = Health(), False, None
        self._results, self._asked = [], set()
        self._running = Container(self.host, root, line, variables, mounts, self._security, log)
        self.started.append(now)
        self.pod = replace(self.pod, phase=Phase.RUNNING)

    def _fields(self) -> dict[str, str]:
        return {
            "metadata.name": self.pod.name,
            "status.podIP": self.host.address,
            "spec.nodeName": self.node,
            COMPLETION_INDEX: str(self.pod.index),
        }

    def _mounted(self, volume: Volume) -> Mount:
        """The volume's folder, which the pod's group may write into."""
        group = self._security.get("fsGroup")
        if volume.kind == "claim":
            place = self._storage.claim(volume.source)
        else:
            place = self._directory / f"{volume.kind}-{volume.source}"
            if not place.exists():
                place.mkdir()
                if volume.kind == "memory":
                    # In the sandbox, so that it stays while the container is started again.
                    self.host.run("mount", "-t", "tmpfs", "tmpfs", str(place))
                    self.host.run("chmod", "1777", str(place))
                elif volume.kind in ("secret", "config"):
                    self._storage.write(volume, place)
                else:
                    place.chmod(0o777)
        if group is not None and volume.kind not in ("memory",):
            _give(place, group)
        return Mount("ro" if volume.read_only else "rw", place, volume.path)

    def _ended(self, code: int, now: float) -> None:
        assert self._running is not None
        self._running = None
        self.codes.append(code)
        policy = self.spec.get("restartPolicy", "Always")
        if self.pod.deleting or policy == "Never" or (policy == "OnFailure" and code == 0):
            self._finish(Phase.FAILED if code else Phase.SUCCEEDED, code, now)
            return
        # The first restart is made at once.
        pause = min(FIRST_PAUSE * 2 ** (self.restarts - 1), LONGEST_PAUSE) if self.restarts else 0.0
        self._start_at = now + self._pace * pause
        self.pod = replace(self.pod, ready=False)

    def _finish(self, phase: Phase, code: int, now: float) -> None:
        self.pod = replace(self.pod, phase=phase, exit_code=code, ready=False, ended=now)
        self.cut()

    # ---- the end of a container ------------------------------------------------------------------------------------

    def _end_container(self, now: float, grace: float) -> None:
        """preStop, then SIGTERM; after the grace, from now on, SIGKILL."""
        if self.is_lost or self._running is None:
            return
        self._kill_at = now + grace if self._kill_at is None else min(self._kill_at, now + grace)
        if grace <= 0:
            self._running.signal(signal.SIGKILL)
            return
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None and self._hook is None:
            if "sleep" in hook:
                self._hook = self._running.exec(["sleep", str(hook["sleep"]["seconds"])])
            else:
                self._hook = self._running.exec(hook["exec"]["command"])
        self._go_on_ending(now)

    def _go_on_ending(self, now: float) -> None:
        assert self._running is not None
        assert self._kill_at is not None
        if now >= self._kill_at:
            self._running.signal(signal.SIGKILL)
        elif not self._noticed and (self._hook is None or self._hook.poll() is not None):
            self._noticed = True
            self._running.signal(signal.SIGTERM)

    # ---- probes ----------------------------------------------------------------------------------------------------

    def _probe(self, container: Container, now: float) -> None:
        while self._results:
            name, ok = self._results.pop(0)
            self._asked.discard(name)
            if f"{name}Probe" in self.container:
                self._health = self._health.with_result(self.container, name, ok, now)
        self.pod = replace(self.pod, ready=self._health.is_ready(self.container) and not self.pod.deleting)
        if self.pod.deleting or self._kill_at is not None:
            return
        if self._health.is_doomed():
            self._end_container(now, self.spec.get("terminationGracePeriodSeconds", 30))
            return
        for name in self._health.wanted(self.container):
            probe = self.container[f"{name}Probe"]
            if name not in self._asked and due(probe, getattr(self._health, name), self.started[-1], now):
                self._asked.add(name)
                results = self._results
                threading.Thread(target=self._ask, args=(container, name, probe, results), daemon=True).start()

    def _ask(self, container: Container, name: str, probe: Mapping[str, Any], results: list[tuple[str, bool]]) -> None:
        seconds = float(probe.get("timeoutSeconds", 1))
        try:
            results.append((name, self._answers(container, probe, seconds)))
        except (OSError, http.client.HTTPException, subprocess.TimeoutExpired):
            results.append((name, False))

    def _answers(self, container: Container, probe: Mapping[str, Any], seconds: float) -> bool:
        """Whether a probe succeeds. Raises OSError, HTTPException, TimeoutExpired."""
        if "exec" in probe:
            process = container.exec(probe["exec"]["command"])
            try:
                return process.wait(seconds) == 0
            finally:
                process.kill()
                process.wait()
        kind = "httpGet" if "httpGet" in probe else "tcpSocket"
        port = port_of(self.container, probe[kind]["port"])
        with self.host.connect((self.host.address, port), seconds) as connection:
            return kind == "tcpSocket" or _status(connection, probe["httpGet"], self.host.address) < 400


def _status(connection: socket.socket, get: Mapping[str, Any], address: str) -> int:
    """The status of a GET. Certificates are not looked at, as the kubelet does not. Raises OSError, HTTPException."""
    if get.get("scheme", "HTTP") == "HTTPS":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = context.wrap_socket(connection)
    client = http.client.HTTPConnection(address)
    client.sock = connection
    client.request("GET", get.get("path", "/"))
    return client.getresponse().status


def _give(place: Path, group: int) -> None:
    """A volume to the pod's group, as `fsGroup` has it."""
    if place.stat().st_gid == group:
        return
    for path in [place, *place.rglob("*")]:
        os.chown(path, -1, group)
        more = 0o2770 if path.is_dir() else 0o440
        path.chmod(path.stat().st_mode | more)
