"""A run's volume with sealed checkpoints, a hub, a Commander, and mirrors as real processes."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint import SHARDED, Manifest, Position, Shape, describe, seal

from .client import Hub
from .commander import TestCommander

RUN = "tune-1"
REPO = "me/tune"


class Volume:
    """`<l1_root>/runs/<run_id>`, with checkpoints as an agent seals them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints, self.hf = root / "ckpt" / RUN, root / "hf"
        self.run_dir = self.checkpoints / "r1"
        self.run_dir.mkdir(parents=True)
        self.hf.mkdir()

    def save(self, step: int, epoch: int = 1, size: int = 200_000, seed: int = 0, extra: str = "") -> Manifest:
        """Seals a checkpoint of two large files, some small ones, an empty one, one in a directory, and `extra`."""
        name = f"step-{step}.e{epoch}.0"
        directory = self.run_dir / name
        (directory / "deep" / "er").mkdir(parents=True)
        draw = random.Random(f"{step} {seed}")
        (directory / "model.bin").write_bytes(draw.randbytes(size))
        (directory / "optimizer.pt").write_bytes(draw.randbytes(size // 2))
        (directory / "config.json").write_text(json.dumps({"step": step}))
        (directory / "tokenizer.json").write_text("{}")
        (directory / "empty.txt").touch()
        if extra:
            (directory / extra).touch()
        (directory / "deep" / "er" / f"rng-{step}.state").write_bytes(draw.randbytes(99))
        manifest = Manifest(
            *(
                name,
                RUN,
                "r1",
                step,
                epoch,
                1,
                SHARDED,
                Shape(1, "ddp", True),
                Position(),
                None,
                None,
                None,
                1,
                1,
                None,
            ),
            describe(directory),
        )
        seal(directory, manifest)
        return manifest

    @property
    def snapshots(self) -> list[str]:
        root = self.hf / "snapshots"
        return sorted(one.name for one in root.iterdir()) if root.is_dir() else []

    def events(self) -> list[dict[str, Any]]:
        """The mirror's, without their times."""
        path = self.hf / "events.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert all(one.pop("time") > 0 for one in found)
        return found


class Mirror:
    """One mirror's process.

    Attributes:
        log: where its lines go; one file for all mirrors of a scene.
    """

    def __init__(self, run_file: Path, volume: Volume, environment: dict[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "dalsegno.relay.milestones.mirror", str(run_file)]
        command += ["--checkpoints", str(volume.checkpoints), "--hf", str(volume.hf)]
        command += ["--events", str(volume.hf / "events.jsonl")]
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stderr=file, stdout=file)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> float:
        """SIGTERM; how long it took, in seconds."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(10) == 0
        return time.monotonic() - begun


class Scene:
    """All of it. Close it."""

    def __init__(self, root: Path, *hub: str, xet: bool = False, **hf: object) -> None:
        for name in ("hub", "volume"):
            (root / name).mkdir()
        self.root, self.hub, self.commander = root, Hub(root / "hub", *hub), TestCommander(RUN)
        self.volume = Volume(root / "volume")
        self.environment = {**self.hub.environment(root / "home"), "DALSEGNO_TOKEN": "t0ken"}
        if not xet:
            self.environment["HF_HUB_DISABLE_XET"] = "1"
        self.run_file = root / "run.yaml"
        self.configure(**hf)
        self.log = root / "mirror.log"
        self.mirrors: list[Mirror] = []

    def configure(self, **hf: object) -> None:
        content = {
            "run_id": RUN,
            "commander": self.commander.url,
            "l1_root": str(self.root),
            "command": ["train", "${save_dir}"],
            "hf": {"repo": REPO, "interval_seconds": 3600, **hf},
            "manifest": {"git_sha": "abc", "hyperparameters": {"lr": 1e-4}},
        }
        self.run_file.write_text(json.dumps(content))

    def commit(self, step: int, **more: Any) -> Manifest:
        manifest = self.volume.save(step, **more)
        self.commander.committed.append(manifest)
        return manifest

    def mirror(self) -> Mirror:
        one = Mirror(self.run_file, self.volume, self.environment, self.log)
        self.mirrors.append(one)
        return one

    def wait(self, what: Callable[[], object], seconds: float = 90.0, every_seconds: float = 0.02) -> Any:
        """What it returns once it is true.

        Raises:
            AssertionError: it was not within so many seconds; with the mirror's lines.
        """
        until = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < until, self.lines()
            time.sleep(every_seconds)  # why: what is waited for is in another process
        return found

    def wait_line(self, text: str, seconds: float = 40.0) -> str:
        return str(self.wait(lambda: next((line for line in self.lines() if text in line), ""), seconds))

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_milestone(self, count: int = 1, seconds: float = 90.0, every_seconds: float = 0.02) -> dict[str, Any]:
        """The newest, once there are so many."""
        self.wait(lambda: len(self.commander.milestones) >= count, seconds, every_seconds)
        return self.commander.milestones[0]

    def close(self) -> None:
        for one in self.mirrors:
            one.kill()
        self.commander.close()
        self.hub.close()


def milestones_on(hub: Hub, root: Path) -> list[dict[str, Any]]:
    """Every milestone that the hub has, oldest first, after a check of each byte.

    Raises:
        AssertionError: one is not what its manifest says, has a file too many, or is there twice.
    """
    found = []
    for commit in hub.commits(REPO):
        if not commit["title"].startswith("Milestone "):
            continue
        files = commit["files"]
        own = json.loads((root / "hub" / "blobs" / files["run_manifest.json"]["sha256"]).read_bytes())
        for one in own["files"]:
            there = files[one["path"]]
            assert (there["sha256"], there["size"]) == (one["sha256"], one["size"]), one
            blob = root / "hub" / "blobs" / one["sha256"]
            if blob.exists():
                assert hashlib.sha256(blob.read_bytes()).hexdigest() == one["sha256"], one
        listed = {one["path"] for one in own["files"]} | {".gitattributes", "run_manifest.json"}
        assert set(files) <= listed | {"README.md"}, set(files) - listed
        found.append({**own, "revision": commit["oid"]})
    keys = [(one["checkpoint"], one["digest"]) for one in found]
    assert len(keys) == len(set(keys)), "one milestone is there twice"
    return found
