"""The Dockerfiles, built as far as it goes without a container engine: `tests/support/images.py` says what differs."""

from __future__ import annotations

import urllib.request

import pytest

from tests.support.images import BASE, Image, built, instructions, missing
from tests.support.jobs.master_process import said_by
from tests.support.pages.sources import ROOT

DOCKER = ROOT / "deploy" / "docker"
RELAY = ROOT / "deploy" / "relay"
_BASES = {rest for path in DOCKER.iterdir() for name, rest in instructions(path.read_text()) if name == "FROM"}
(VERSION,) = {found[1] for base in _BASES if (found := BASE.match(base))}
MISSING = missing(VERSION)

pytestmark = [
    pytest.mark.full,
    pytest.mark.once,
    pytest.mark.timeout(2000),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


def assert_serves(image: Image, *program: str) -> None:
    """A master answers, with the store and the edge of the manifests."""
    words = (*program, "--job-id=gpt", "--insecure", "--host=127.0.0.1", "--port=0", "--http-port=0")
    with image.started(*words, "--store=sqlite:////tmp/job.sqlite") as master:
        said = said_by(master)
        with urllib.request.urlopen(f"http://{said['http']}/healthz", timeout=20) as reply:
            assert reply.status == 200


def test_the_masters_image_serves() -> None:
    """Its entry point is a master that answers, with the store and the edge of the manifests; no torch is in it."""
    with built(DOCKER / "master.Dockerfile") as image:
        assert_serves(image)
        image.entrypoint = ["python", "-c"]
        code = "import os, importlib.util as u; print(os.getuid(), *(u.find_spec(name) is None for name in {}))"
        names = ["torch", "numpy", "deepspeed", "aetcd", "fastapi", "dalsegno.master"]
        done = image.run(code.format(names))
        assert done.stdout.split() == ["1000", "True", "True", "True", "False", "False", "False"], done.stderr


def test_the_trainers_image_trains() -> None:
    """Its programs are on the PATH, the doctor finds nothing wrong, and an example makes its steps, as in a pod.

    It is the master's image, too, where a job names no other.
    """
    with built(DOCKER / "trainer.Dockerfile") as image:
        assert_serves(image, "dlrover-master")
        assert image.user == "1000:1000"
        helped = image.run("dlrover-run", "--help")
        assert (helped.returncode, "--nnodes" in helped.stdout) == (0, True), helped.stderr
        looked = image.run("dalsegno", "doctor")
        assert looked.returncode == 0, looked.stdout + looked.stderr
        trained = image.run(
            *("dlrover-run", "--nnodes=1", "--checkpoint-dir=/tmp/checkpoints", "examples/ddp.py"),
            *("--steps=4", "--save-every=2"),
        )
        assert (trained.returncode, "finished at step 4" in trained.stdout + trained.stderr) == (0, True), trained


def test_a_pods_image_checks_its_input_and_trains() -> None:
    """Its entry point hands over to `dalsegno relay`, which says what is wrong with a run before anything starts.

    It has what its example of a Hugging Face Trainer imports.
    """
    with built(RELAY / "Dockerfile") as image:
        said = image.run("/not/there.yaml")
        assert (said.returncode, "/not/there.yaml cannot be read" in said.stderr) == (2, True), said
        image.entrypoint = ["python"]
        trained = image.run("examples/relay_sft.py", "--output_dir=/tmp/out", "--max_steps=2", "--save_steps=2")
        assert trained.returncode == 0, trained.stderr
