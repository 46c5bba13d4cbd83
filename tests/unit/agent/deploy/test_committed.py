"""`deploy/` holds what `dalsegno render` prints now, and its overlays come to what their jobs say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.commands import arguments, dalsegno
from dalsegno.agent.deploy.job import JobSpec, job_of
from dalsegno.agent.deploy.kubernetes import objects
from dalsegno.agent.deploy.refusals import TARGETS
from dalsegno.master import cli
from dalsegno.protos.yaml_text import documents
from tests.support.deploy import pods
from tests.support.images import instructions
from tests.support.pages.sources import ROOT, imports, parsed

DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
OVERLAYS = sorted(path for path in (DEPLOY / "kubernetes" / "overlays").iterdir())
FOLDERS = [("k8s", BASE), *(("k8s", path) for path in OVERLAYS), ("slurm", DEPLOY / "slurm")]
FOLDERS.append(("systemd", DEPLOY / "systemd"))
POD = DEPLOY / "relay" / "Dockerfile"
DOCKERFILES = [*sorted((DEPLOY / "docker").glob("*.Dockerfile")), POD]
# The extra that brings what a script imports.
EXTRA_OF = {"torch": "train", "transformers": "hf"}


@pytest.mark.parametrize(("target", "folder"), FOLDERS, ids=lambda value: getattr(value, "name", value))
def test_it_is_what_render_prints(
    target: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """File by file, byte by byte; `make manifests` writes them anew."""
    # As deep as the folder itself, so that an overlay names its base by the same path.
    out = tmp_path / "deploy" / folder.relative_to(DEPLOY)
    (tmp_path / "deploy" / "kubernetes" / "base").mkdir(parents=True)
    base = tmp_path / "deploy" / "kubernetes" / "base" / "job.yaml"
    base.write_bytes((BASE / "job.yaml").read_bytes())
    line = ["render", target, str(folder / "job.yaml"), "--output", str(out)]
    assert dalsegno.run([*line, *(["--base", str(base)] if folder in OVERLAYS else [])]) == 0
    committed = {path.name: path.read_text() for path in folder.iterdir() if path.name != "job.yaml"}
    assert {path.name: path.read_text() for path in out.iterdir() if path.name != "job.yaml"} == committed
    assert capsys.readouterr().err == ""


def read(path: Path) -> list[Any]:
    return documents(path.read_text(), str(path))


def built(folder: Path) -> list[dict[str, Any]]:
    """What `kustomize build` makes of it, as far as these folders use Kustomize."""
    (head,) = read(folder / "kustomization.yaml")
    assert set(head) <= {"apiVersion", "kind", "resources", "patches"}
    found: list[dict[str, Any]] = []
    for name in head["resources"]:
        path = folder / name
        found += built(path) if path.is_dir() else read(path)
    for patch in head.get("patches", []):
        (content,) = read(folder / patch["path"])
        if isinstance(content, dict):
            assert content.pop("$patch") == "delete"
            target = {"kind": content["kind"], "name": content["metadata"]["name"]}
        else:
            target = patch["target"]
        (one,) = [
            each for each in found if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        if isinstance(content, dict):
            found.remove(one)
        else:
            for operation in content:
                apply(one, operation)
    return found


def apply(one: dict[str, Any], operation: dict[str, Any]) -> None:
    """One operation of RFC 6902 on mappings: what is replaced or removed must be there."""
    *above, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    for part in above:
        one = one[part]
    assert (last in one) == (operation["op"] != "add")
    if operation["op"] == "remove":
        del one[last]
    else:
        one[last] = operation["value"]


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda path: path.name)
def test_kustomize_comes_to_what_the_job_says(folder: Path) -> None:
    """Base and patches together are the objects of the overlay's own job."""
    (values,) = read(folder / "job.yaml")
    expected = {(one["kind"], one["metadata"]["name"]): one for one in objects(job_of(values))}
    assert {(one["kind"], one["metadata"]["name"]): one for one in built(folder)} == expected


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda path: path.name)
def test_a_job_is_a_dozen_lines(folder: Path) -> None:
    """Not one more than that, comments aside."""
    lines = (folder / "job.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 12


@pytest.mark.parametrize("target", TARGETS)
def test_the_printed_job_is_rendered(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job of docs/operations.md is one for all three; and its table has all keys that there are."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "job.yaml").write_text(text)
    assert dalsegno.run(["render", target, str(tmp_path / "job.yaml")]) == 0
    assert "gpt" in capsys.readouterr().out
    rows = re.findall(r"^\| (`.*?`) \|", page.partition("## Keys")[2].partition("\n## ")[0], re.MULTILINE)
    assert {name.strip("`") for row in rows for name in row.split(", ")} == {field.name for field in fields(JobSpec)}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_can_be_read(path: Path) -> None:
    """Known instructions, RUN lines that a shell parses, sources that there are, and a user that is not root.

    A pod of a relayed run is root, as rented machines have it. `tests/integration/test_images.py` carries them out.
    """
    found = instructions(path.read_text())
    assert {name for name, _ in found} <= {"FROM", "ARG", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}
    for name, rest in found:
        if name == "RUN":
            done = subprocess.run(["sh", "-n"], input=rest, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr
            for extras in re.findall(r"/src\[([a-z,]+)\]", rest):
                config = (ROOT / "setup.cfg").read_text()
                assert all(f"\n{extra} =\n" in config for extra in extras.split(","))
        if name == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in shlex.split(rest)[:-1])
    assert [rest for name, rest in found if name == "USER"] == ([] if path == POD else ["1000:1000"])


def test_an_index_is_that_of_pytorch_alone() -> None:
    """A build argument is a variable of all later lines, and pip would ask PyTorch's index for all the rest, too."""
    found = [(name, rest) for path in DOCKERFILES for name, rest in instructions(path.read_text())]
    assert [rest for name, rest in found if name in ("ARG", "ENV") and rest.upper().startswith("PIP_")] == []
    (index,) = {rest for name, rest in found if name == "ARG" and "INDEX" in rest}
    assert index == "TORCH_INDEX_URL="
    using = [rest for name, rest in found if name == "RUN" and "INDEX_URL" in rest]
    assert len(using) == 2
    assert all(rest.endswith('"$TORCH"') and "/src" not in rest for rest in using)


@pytest.mark.parametrize("path", sorted((DEPLOY / "relay").glob("*.yaml")), ids=lambda path: path.name)
def test_a_pods_image_has_what_its_run_imports(path: Path) -> None:
    """A run whose trainer is an example of ours starts in the image beside it."""
    (values,) = documents(path.read_text(), path.name)
    scripts = [word for word in values["command"] if word.startswith("examples/")]
    for script in scripts:
        tree = parsed((ROOT / script).read_text())
        names = {name.split(".")[0] for _, name, _ in imports(Path(script), tree)} - sys.stdlib_module_names
        assert names <= {*EXTRA_OF, "common"}
        (extras,) = re.findall(r"/src\[([a-z,]+)\]", POD.read_text())
        assert {EXTRA_OF[name] for name in names - {"common"}} <= set(extras.split(","))


def test_the_images_have_what_the_manifests_start() -> None:
    """The script lies where the trainer's image puts the examples, and both programs are on the images' PATH."""
    (values,) = read(BASE / "job.yaml")
    found = pods(objects(job_of(values)))
    words = found["trainer"]["containers"][0]["command"]
    script = arguments.parse(words[1:], {}).training_script
    trainer = (DEPLOY / "docker" / "trainer.Dockerfile").read_text()
    assert "cp -r /src/examples /opt/dalsegno/examples" in trainer
    assert (ROOT / Path(script).relative_to("/opt/dalsegno")).is_file()
    assert all("ENV PATH=/opt/dalsegno/bin:$PATH" in path.read_text() for path in DOCKERFILES)


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
@pytest.mark.parametrize("etcd", [False, True])
def test_either_image_can_be_the_masters(path: Path, etcd: bool) -> None:
    """The trainer's is where no `master.image` is named. A master without an extra that its flags want ends with 2."""
    (values,) = read(BASE / "job.yaml")
    del values["master"]
    job = job_of(values | ({"etcd": ["etcd:2379"]} if etcd else {}))
    container = pods(objects(job))["master"]["containers"][0]
    assert container["image"] == job.image
    words = [word.replace("$(POD_IP)", "10.0.0.1") for word in container["command"][1:]]
    options = cli._parser().parse_args(words)
    wanted = {"http"} if options.http_port is not None else set()
    if options.store.startswith("etcd://"):
        wanted.add("etcd")
    assert wanted == ({"http", "etcd"} if etcd else {"http"})
    (extras,) = re.findall(r"/src\[([a-z,]+)\]", path.read_text())
    assert wanted <= set(extras.split(","))
