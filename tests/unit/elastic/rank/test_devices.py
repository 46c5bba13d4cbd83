"""Cards and ranks, as far as that can be shown without a card; with one: `tests/gpu`."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from dalsegno.elastic import Batches, BatchPlan, Counts, ElasticSampler, Evaluator, Session
from dalsegno.elastic.data import counts
from dalsegno.elastic.data.evaluator import to_device
from dalsegno.elastic.rank import process_group, rng
from dalsegno.elastic.rank.collective import GlooCollective
from dalsegno.elastic.rank.process_group import shared_cards
from dalsegno.elastic.saving.resuming import ResumePoint
from dalsegno.elastic.saving.staging import HostBuffers
from dalsegno.elastic.trainer.strategies import own_device
from tests.support.jobs.ports import free_port
from tests.unit.elastic.saving.test_resuming import point

CPU = torch.device("cpu")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine that says it has two cards; the list gets those that become the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("local_rank", "wanted", "found"),
    [
        (1, None, "cuda:1"),
        (1, "cuda", "cuda:1"),
        (3, None, "cuda:1"),
        (1, "cuda:0", "cuda:0"),
    ],
)
def test_a_card_is_bound_by_local_rank(
    cards: list[torch.device], local_rank: int, wanted: str | None, found: str
) -> None:
    """Also where `cuda` is all that was said; with fewer cards than ranks they are shared. It is made the current."""
    device = own_device(local_rank, None if wanted is None else torch.device(wanted))
    assert (device, cards) == (torch.device(found), [torch.device(found)])


def test_cards_are_left_alone_where_others_are_wanted(cards: list[torch.device]) -> None:
    """Not even made the current one."""
    assert own_device(1, CPU) == CPU
    assert not cards


@pytest.mark.parametrize(("names", "shared"), [(["a", "b"], False), (["a", "b", "a"], True)])
def test_ranks_that_share_a_card_all_know(names: list[str], shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks get the same answer, and one line says so, once."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    found: list[bool] = []

    def ask(rank: int) -> None:
        found.append(shared_cards(store, rank, len(names), names[rank]))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [shared] * len(names)
    lines = ["3 ranks share 2 cards, up to 2 on one: gloo takes NCCL's place" in line for line in caplog.messages]
    assert lines == [True] * shared


@pytest.mark.parametrize(
    ("device", "shared", "backend"),
    [("cpu", False, "gloo"), ("cuda", False, "cpu:gloo,cuda:nccl"), ("cuda", True, "gloo"), ("xpu", False, None)],
)
def test_the_backend_goes_by_the_device(device: str, shared: bool, backend: str | None) -> None:
    """Torch's own choice goes by the machine: NCCL alone where there is a card, also for a training on CPUs."""
    assert process_group._backend(torch.device(device), shared=shared) == backend


@pytest.mark.parametrize(
    ("config", "device", "where"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda"),
        ("cpu:gloo", "cuda:1", "cpu"),
    ],
)
def test_sums_are_made_where_the_group_works(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str, where: str
) -> None:
    """A group of NCCL alone takes nothing from the CPU, also where the sums are kept there."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert counts.collective_device(torch.device(device)) == torch.device(where)


class Moved(torch.Tensor):
    """Notes how it was asked to move."""

    asked: list[Any]

    def to(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.asked.append(options["non_blocking"])
        return self.as_subclass(torch.Tensor)

    def detach(self) -> Moved:
        return self


def test_nothing_comes_to_the_cpu_unfinished() -> None:
    """`to("cpu", non_blocking=True)` from a card gives memory that is filled later: sums of it were wrong at times."""
    tensor = torch.ones(3).as_subclass(Moved)
    tensor.asked = []
    to_device({"rows": [tensor]}, CPU)
    Counts("cpu").add({"hits": tensor})
    assert tensor.asked == [False, False]
    to_device(tensor, torch.device("cuda"))
    assert tensor.asked[-1] is True


def test_a_save_on_the_cpu_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a card's generator makes a context there, for each rank: not where CUDA is not in use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("CUDA was started"))
    assert "cuda" not in json.loads(rng.capture())


def test_only_the_current_cards_generator_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for without a number, and put back so."""
    asked: list[Any] = []
    state = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *device: asked.append(device) or state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: asked.append(given))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext", raising=False)
    rng.restore(rng.capture())
    assert asked[0] == ()
    assert len(asked[1]) == 1
    assert torch.equal(asked[1][0], state)


@pytest.mark.parametrize(("used", "waited"), [([], []), ([2], [2]), ([0, 2], [0, 2]), (None, [1])])
def test_the_cards_that_are_used_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, used: list[int] | None, waited: list[int]
) -> None:
    """A script may not make its own the current one; and to wait for one that is not used would make a context."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext", raising=False)
    if used is not None:
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda number: number in used, raising=False)
    found = list[int]()
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    process_group.settle_device()
    assert found == waited


def saved(run_dir: Path, rank: int, state: str) -> ResumePoint:
    """A resume point with one rank's generators."""
    file = run_dir / "step-7.e2.1" / rng.file_name(rank)
    file.parent.mkdir(parents=True)
    file.write_text(state)
    return point(file.parent.parent)


def restored(resume: ResumePoint, rank: int) -> None:
    session: Any = SimpleNamespace(resume=resume, world_size=2, rank=rank, step=7, _begun=False)
    Session.restore_rng(session, 3)


def test_generators_that_a_node_does_not_see_are_not_made_anew(tmp_path: Path) -> None:
    """The manifest lists them: one rank alone would go on with other numbers. Where none were saved it is seeded."""
    resume = saved(tmp_path, 1, rng.capture().decode())
    restored(resume, 0)
    drawn = torch.rand(1)
    rng.seed_rank(3, 7, 0)
    assert torch.equal(torch.rand(1), drawn)
    (resume.path / rng.file_name(1)).unlink()
    with pytest.raises(OSError, match=r"rng/rank-1\.json is not here, although the checkpoint's manifest lists it"):
        restored(resume, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_generator_that_was_not_saved_is_the_ranks_own(tmp_path: Path, rank: int) -> None:
    """A run on CPUs saves no card's: it is seeded by rank, not left as all ranks alike have it. Shown with numpy's."""
    torch.manual_seed(5)
    random.seed(5)
    state = json.loads(rng.capture())
    wanted = torch.rand(1)
    del state["numpy"]
    resume = saved(tmp_path, rank, json.dumps(state))
    numpy.random.seed(1)
    torch.rand(3)
    restored(resume, rank)
    assert torch.equal(torch.rand(1), wanted), "what was saved goes on bit by bit"
    drawn = numpy.random.rand()
    rng.seed_rank(3, 7, rank)
    assert numpy.random.rand() == drawn


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_a_save_goes_on_where_nothing_can_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """One line, and memory as it is: a slow copy is better than no checkpoint."""
    buffers = HostBuffers()
    assert [buffers._buffer(64, pinned=True).numel() for _ in range(2)] == [64, 64]
    assert [line.split(":")[0] for line in caplog.messages] == ["saves are copied more slowly"]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """A script that has called ``torch.set_default_device``: tensors that name no device are not on the CPU."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("elsewhere")
def test_a_default_device_does_not_move_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's collectives, copies for saves, generators and loaders stay on the CPU."""
    port = free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    group = GlooCollective(0, 1, 0)
    assert group.gather({"a": [1, 2]}) == [{"a": [1, 2]}]
    assert group.max([3, -1]) == [3, -1]
    group.close()
    tensor = torch.arange(4.0, device=CPU)
    assert HostBuffers().copy({"a": tensor})["a"].tolist() == [0, 1, 2, 3]
    rng.restore(rng.capture())
    data = [torch.full((2,), float(index), device=CPU) for index in range(6)]
    batches: Any = Batches(data, ElasticSampler(6, 3, shuffle=False), BatchPlan(3, 1, 3), 0, data_epochs=1)
    assert [micro.data[:, 0].tolist() for batch in batches for micro in batch.micro_batches] == [[0, 1, 2], [3, 4, 5]]
    measured = Evaluator(data, lambda model, rows: {"sum": (rows.sum(), len(rows))}, batch_size=4)
    assert measured.run(torch.nn.Identity(), device=CPU) == {"sum": 5.0}


@pytest.mark.parametrize("fused", [False, True])
def test_zeros_count_of_steps_goes_where_the_optimizer_counts(fused: bool) -> None:
    """It is read on the CPU; a fused optimizer's kernel would take its address for one of the card's."""
    from dalsegno.elastic.deepspeed.loading import separate_steps

    parameters = [torch.nn.Parameter(torch.zeros(2, device="meta")) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.param_groups[0]["fused"] = fused
    shared = torch.tensor(4.0)
    for parameter in parameters:
        optimizer.state[parameter]["step"] = shared
    separate_steps(SimpleNamespace(optimizer=optimizer))
    steps = [optimizer.state[parameter]["step"] for parameter in parameters]
    assert [step.device.type for step in steps] == ["meta" if fused else "cpu"] * 2
    assert steps[0] is not steps[1]


def test_deepspeed_wants_a_card_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine goes by LOCAL_RANK alone: refused with one line before anything is made."""
    import deepspeed.accelerator

    from dalsegno.elastic.trainer.deepspeed_strategy import DeepSpeed

    accelerator = SimpleNamespace(device_name=lambda number=None: "cuda", device_count=lambda: 1)
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
    with pytest.raises(ValueError, match=r"local rank 1, and 1 card here: .*--nproc-per-node=gpu"):
        DeepSpeed().start(2, 1, None)


@pytest.mark.parametrize(
    ("view", "sent"),
    [
        (lambda t: t, 12),
        (lambda t: t.t(), 12),
        (lambda t: t[:, ::2], 6),
        (lambda t: t[:, :1].expand(3, 9), 3),
        (lambda t: t[:0], 0),
        (lambda t: t[0, 0].expand(2, 5), 1),
    ],
)
def test_rank_0s_values_come_wherever_they_lie(monkeypatch: pytest.MonkeyPatch, view: Any, sent: int) -> None:
    """gloo takes as many elements as there are behind the first one, and so would write behind an expanded one."""

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        assert tensor.is_contiguous()
        assert tensor.numel() == sent
        tensor.fill_(7)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    whole = torch.zeros(3, 4)
    tensor = view(whole)
    process_group.send_rank_0s(tensor)
    assert tensor.eq(7).all()
    assert whole.eq(7).sum() == sent


def test_what_has_no_values_side_by_side_is_not_sent() -> None:
    with pytest.raises(ValueError, match=r"a tensor with torch\.sparse_coo cannot be sent to all ranks"):
        process_group.send_rank_0s(torch.eye(2).to_sparse())
