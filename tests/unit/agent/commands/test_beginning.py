"""What an agent begins with before it imports torch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.commands import launch
from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.beginning import nursery_spec, script_of, spin_little, take_large_pages
from dalsegno.agent.script import modules_of
from dalsegno.agent.shell import console

LOG = Path("standby.log")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import transformers\n")
    return str(path)


@pytest.mark.slow
def test_it_needs_neither_torch_nor_grpc() -> None:
    """Else the nursery would wait for them, and gRPC would take its settings too early."""
    code = "import sys, dalsegno.agent.commands.beginning; print(sorted({'torch', 'grpc', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("flags", [(), ("-m",), ("--no-python",)])
@pytest.mark.parametrize("interpreter", ["", "/usr/bin/another"])
def test_it_composes_the_script_as_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, flags: tuple[str, ...], interpreter: str
) -> None:
    if interpreter:
        monkeypatch.setenv("PYTHON_EXEC", interpreter)
    options = parse(["--job-id=job", *flags, script, "--own", "1"], {})
    assert script_of(options) == launch._torch_config(options, tmp_path)[1]


def test_the_nursery_gets_what_the_pool_would_give_it(script: str) -> None:
    """Its modules follow from the script's text."""
    spec = nursery_spec(parse(["--job-id=job", script], {}), LOG, (15, 2), {"HOME": "here"})
    assert spec is not None
    assert (spec.modules, spec.log, spec.notices) == (modules_of(Path(script)), LOG, (15, 2))
    assert "transformers" in spec.modules
    assert (spec.environment, spec.python, spec.single) == ({"HOME": "here"}, sys.executable, False)


@pytest.mark.parametrize("flags", [("--no-python",), ("--virtual-local-rank",), ("--numa-binding=node",)])
def test_where_nothing_is_forked_there_is_none(script: str, flags: tuple[str, ...]) -> None:
    assert nursery_spec(parse(["--job-id=job", *flags, script], {}), LOG, (), {}) is None


@pytest.mark.parametrize(("nproc", "given", "threads"), [("1", "", None), ("2", "", "1"), ("2", "4", "4")])
def test_its_threads_are_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, nproc: str, given: str, threads: str | None
) -> None:
    """Torch sets their number for several workers, and a library reads it only once. The pool would refuse another."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    options = parse(["--job-id=job", f"--nproc-per-node={nproc}", script], {})
    spec = nursery_spec(options, LOG, (), os.environ)
    assert spec is not None
    assert spec.environment.get("OMP_NUM_THREADS") == threads
    launch._torch_config(options, tmp_path)
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_wait_asleep_unless_somebody_chose_otherwise(chosen: dict[str, str], spins: str | None) -> None:
    environment = dict(chosen)
    spin_little(environment)
    assert environment == {**chosen, **({} if spins is None else {"GOMP_SPINCOUNT": spins})}


@pytest.mark.parametrize(
    ("enabled", "size", "chosen", "found"),
    [
        ("always [madvise] never", 2 << 20, {}, {"THP_MEM_ALLOC_ENABLE": "1"}),
        ("[always] madvise never", 2 << 20, {"A": "B"}, {"A": "B", "THP_MEM_ALLOC_ENABLE": "1"}),
        ("always [madvise] never", 2 << 20, {"THP_MEM_ALLOC_ENABLE": "0"}, {"THP_MEM_ALLOC_ENABLE": "0"}),
        ("always madvise [never]", 2 << 20, {}, {}),
        ("always [madvise] never", 512 << 20, {}, {}),
        ("always [madvise] never", "?", {}, {}),
        (None, 2 << 20, {}, {}),
    ],
)
def test_large_pages_are_taken_where_there_are_any(
    tmp_path: Path, enabled: str | None, size: Any, chosen: dict[str, str], found: dict[str, str]
) -> None:
    pages = tmp_path / "kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    if enabled is not None:
        (pages / "enabled").write_text(enabled)
    (pages / "hpage_pmd_size").write_text(f"{size}\n")
    take_large_pages(chosen, tmp_path)
    assert chosen == found


@pytest.mark.parametrize(
    ("device", "features", "found"),
    [("0x0005", "011001", {}), ("0x0005", "0110001", {"THP_MEM_ALLOC_ENABLE": "1"}), ("0x0002", "111111", None)],
    ids=["gives back", "keeps", "disk"],
)
def test_memory_that_goes_back_to_the_host_is_taken_in_small_pages(
    tmp_path: Path, device: str, features: str, found: dict[str, str] | None
) -> None:
    """Of all its virtual devices a machine's balloon says so."""
    pages, balloon = tmp_path / "kernel/mm/transparent_hugepage", tmp_path / "bus/virtio/devices/virtio0"
    for folder in (pages, balloon, balloon.with_name("virtio1")):
        folder.mkdir(parents=True)
    (pages / "enabled").write_text("always [madvise] never\n")
    (pages / "hpage_pmd_size").write_text("2097152\n")
    (balloon / "device").write_text(f"{device}\n")
    (balloon / "features").write_text(f"{features:0<64}\n")
    environment: dict[str, str] = {}
    take_large_pages(environment, tmp_path)
    assert environment == ({"THP_MEM_ALLOC_ENABLE": "1"} if found is None else found)


def test_cards_are_counted_as_torch_would(script: str) -> None:
    """What the environment hides does not count; without any, "auto" means the cores."""
    hidden = parse(["--job-id=job", "--nproc-per-node=auto", script], {})
    spec = nursery_spec(hidden, LOG, (), {"CUDA_VISIBLE_DEVICES": ""})
    assert spec is not None
    assert (spec.environment.get("OMP_NUM_THREADS") == "1") == (len(os.sched_getaffinity(0)) > 1)


def test_torchs_log_goes_to_ours_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, one handler: two of them would rotate it under each other."""
    ours, theirs = logging.getLogger("dalsegno"), logging.getLogger("torch.distributed")
    for logger in (ours, theirs):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
    console.set_up_logging(tmp_path / "agent.log", lambda: "here", ("dalsegno",))
    assert theirs.handlers == []
    console.log_torch()
    assert (theirs.handlers, theirs.propagate) == (ours.handlers, False)
    ours.handlers[0].close()
