"""`make test-kind`, as far as that can be seen without Docker and kind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dalsegno.protos.yaml_text import documents
from tests.support.deploy import of_kind
from tests.support.pages.sources import ROOT

KIND = ROOT / "deploy" / "kind"
SCRIPT = KIND / "run.sh"


def test_the_script_is_one() -> None:
    """bash reads it, and it may be executed."""
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False, timeout=60).returncode == 0
    assert os.access(SCRIPT, os.X_OK)


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    """One line and exit code 1, before anything is built; and nothing of what is there is named."""
    for name in ("bash", "dirname", "kubectl", "openssl"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = "test-kind needs docker kind: install what is missing, and run it again\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_its_overlay_is_the_example_with_loaded_images() -> None:
    """Every image has the tag that the script builds and loads; the Job's claim is the one that is made for it."""
    made = subprocess.run(["kubectl", "kustomize", str(KIND)], capture_output=True, text=True, check=False, timeout=60)
    assert made.returncode == 0, made.stderr
    objects = documents(made.stdout, "kustomize")
    job, master = of_kind(objects, "Job"), of_kind(objects, "StatefulSet")
    pods = {"trainer": job["spec"]["template"]["spec"], "master": master["spec"]["template"]["spec"]}
    text = SCRIPT.read_text()
    for name, pod in pods.items():
        (container,) = pod["containers"]
        assert container["image"] == f"dalsegno-{name}:kind"
        assert f"--tag={container['image']}" in text
    claim, volume = of_kind(objects, "PersistentVolumeClaim"), of_kind(objects, "PersistentVolume")
    claimed = [
        one["persistentVolumeClaim"]["claimName"]
        for one in pods["trainer"]["volumes"]
        if "persistentVolumeClaim" in one
    ]
    assert claimed == [claim["metadata"]["name"]]
    assert (claim["spec"]["volumeName"], claim["spec"]["storageClassName"]) == (volume["metadata"]["name"], "")
    assert f"mkdir --mode=1777 {volume['spec']['hostPath']['path']}" in text
