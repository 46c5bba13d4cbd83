"""How many nodes and workers a command line means that does not say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dalsegno.agent.commands import launch, size
from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.beginning import nursery_spec
from dalsegno.agent.commands.size import cards, idle_cards
from dalsegno.agent.commands.unused import ignored
from dalsegno.protos.options import UsageError

AUTO, SCRIPT = "--auto-config", "x.py"


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a machine's devices: eight cards, and what belongs to all of them."""
    for name in (*(f"nvidia{number}" for number in range(8)), "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(size, "_DEVICES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "environ", "nodes", "nproc"),
    [
        ([], {"NODE_NUM": "4"}, "1:1", "1"),
        ([AUTO], {}, "1:1", "gpu"),
        ([AUTO], {"NODE_NUM": "4"}, "4:4", "gpu"),
        ([AUTO], {"NODE_NUM": ""}, "1:1", "gpu"),
        ([], {"PET_AUTO_CONFIG": "1", "NODE_NUM": "4"}, "4:4", "gpu"),
        ([AUTO, "--nnodes=1:4"], {"NODE_NUM": "8"}, "1:4", "gpu"),
        ([AUTO], {"NODE_NUM": "8", "PET_NNODES": "1:1"}, "1:1", "gpu"),
        ([AUTO, "--nnodes=1:4"], {"NODE_NUM": "none of ours"}, "1:4", "gpu"),
        ([AUTO, "--nproc-per-node=1"], {"NODE_NUM": "4"}, "4:4", "1"),
        ([AUTO], {"NODE_NUM": "4", "PET_NPROC_PER_NODE": "2"}, "4:4", "2"),
    ],
)
def test_auto_config_fills_in_what_is_not_given(
    arguments: list[str], environ: dict[str, str], nodes: str, nproc: str
) -> None:
    """As DLRover's does: the operator's number of nodes, and a worker for each card. Any flag or variable wins."""
    options = parse([*arguments, SCRIPT], environ)
    assert (options.nnodes, options.nproc_per_node) == (nodes, nproc)
    assert ignored(options) == []


def test_auto_config_without_anything_to_fill_in_says_so() -> None:
    given = parse([AUTO, "--nnodes=2", "--nproc-per-node=8", SCRIPT], {"NODE_NUM": "4"})
    assert ignored(given) == ["--auto-config has no effect: --nnodes and --nproc-per-node are given"]


@pytest.mark.parametrize("number", ["four", "0", "-1", "1:4", "1.5", "9" * 50])
def test_a_number_of_nodes_that_is_none_is_one_line(number: str) -> None:
    with pytest.raises(UsageError, match=r"variable NODE_NUM, which --auto-config reads: .* give --nnodes") as error:
        parse([AUTO, SCRIPT], {"NODE_NUM": number})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 160


@pytest.mark.parametrize(("here", "workers"), [(8, 8), (0, 1)])
def test_a_worker_for_each_card_or_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: int, workers: int
) -> None:
    """Without a card DLRover starts one worker; `gpu` that somebody typed is refused there, as torchrun refuses it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, _ = launch._torch_config(parse(["--job-id=job", AUTO, SCRIPT], {}), tmp_path)
    assert config.nproc_per_node == workers
    typed = parse(["--job-id=job", AUTO, "--nproc-per-node=gpu", SCRIPT], {})
    if here:
        assert launch._torch_config(typed, tmp_path)[0].nproc_per_node == workers
    else:
        with pytest.raises(UsageError, match="Cuda is not available"):
            launch._torch_config(typed, tmp_path)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, 8), ("", 0), ("0", 1), ("3, 5", 2), ("0,1,-1,2", 2), ("-1", 0), ("GPU-a,GPU-b,GPU-c", 3)],
)
def test_cards_are_those_that_workers_would_see(devices: Path, visible: str | None, seen: int) -> None:
    """What belongs to all cards is none, and what the environment hides does not count."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cards(environ) == seen
    script = devices / SCRIPT
    script.touch()
    spec = nursery_spec(parse(["--job-id=job", AUTO, str(script)], {}), devices / "log", (), environ)
    assert spec is not None
    assert spec.environment.get("OMP_NUM_THREADS") == ("1" if seen > 1 else None)


def test_a_machine_without_devices_has_no_cards(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "_DEVICES", devices / "none")
    assert cards({}) == 0


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["--nproc-per-node=1"], {}),
        (["--nproc-per-node=gpu"], {}),
        ([AUTO], {}),
        ([], {"PET_NPROC_PER_NODE": "1"}),
        ([], {"CUDA_VISIBLE_DEVICES": "2"}),
    ],
)
def test_cards_that_stay_idle_are_told(devices: Path, arguments: list[str], environ: dict[str, str]) -> None:
    """Whoever drops a launcher that starts a worker for each card trains on one of them; who says a number means it."""
    line = "this node has 8 cards and one worker: --nproc-per-node=gpu starts a worker for each card (=1: one is meant)"
    assert idle_cards(parse([SCRIPT], {}), {}) == [line]
    assert idle_cards(parse([*arguments, SCRIPT], environ), environ) == []
