"""Copies of a training state: true to the original, apart from it, and in memory that is used again."""

from __future__ import annotations

import gc
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic import background
from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, Position, Tracked, verify
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving import saving, staging
from dalsegno.elastic.saving.background_save import check_paths
from dalsegno.elastic.saving.outcomes import SaveError
from dalsegno.elastic.saving.saving import Content, Saver
from dalsegno.elastic.saving.saving_reports import Count
from dalsegno.elastic.saving.staging import HostBuffers

pytestmark = pytest.mark.timeout(60)

Pair = namedtuple("Pair", ["left", "right"])


def state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    flat = torch.arange(12, dtype=torch.float32)
    return {
        "model": model.state_dict(),
        "views": [flat[2:5], flat.view(3, 4).t(), flat],
        "step": 7,
        "pair": Pair(torch.tensor(1.5, dtype=torch.bfloat16), ("a", [torch.empty(0)])),
        "mask": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
    }


def test_a_copy_is_equal_apart_and_tied_alike(tmp_path: Path) -> None:
    """torch.save of the copy gives the same tensors; what shares memory still does; the original may change."""
    original = state()
    torch.save(original, tmp_path / "original.pt")
    copied = HostBuffers().copy(original)
    for tensor in [*original["model"].values(), *original["views"], original["pair"].left, original["mask"]]:
        tensor.zero_()
    torch.save(copied, tmp_path / "copied.pt")
    wanted, found = (torch.load(tmp_path / name, weights_only=False) for name in ("original.pt", "copied.pt"))
    assert type(found["pair"]) is Pair
    assert list(found["model"]) == list(wanted["model"])
    assert found["model"]._metadata == wanted["model"]._metadata
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
        assert found["model"][name].dtype == tensor.dtype
    assert torch.equal(found["complex"], wanted["complex"])
    assert found["pair"].left == 1.5
    assert found["model"]["0.weight"].data_ptr() == found["model"]["2.weight"].data_ptr()
    part, turned, whole = found["views"]
    assert (part.tolist(), turned.shape, turned[1].tolist()) == ([2, 3, 4], (4, 3), [1, 5, 9])
    whole[3] = 99
    assert part[1] == 99
    assert (tmp_path / "copied.pt").stat().st_size < 1.1 * (tmp_path / "original.pt").stat().st_size


@pytest.mark.parametrize(
    "make",
    [
        lambda: [whole := torch.arange(4.0), whole.view(2, 2), whole[1:]],
        lambda: [(whole := torch.arange(4.0)).as_strided((2, 2), (0, 1)), whole],
        lambda: [(whole := torch.arange(6.0).view(2, 3)).t(), whole],
        lambda: [torch.empty(0, 3), torch.empty(2, 0), torch.tensor(2.0)],
        lambda: [torch.nn.Parameter(torch.ones(3)), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True, False])],
        lambda: [torch.arange(3, dtype=torch.uint8).view(torch.uint4), torch.ones(1, 4).expand(3, 4)],
        lambda: [torch.tensor([float("nan"), -0.0]), torch.arange(4, dtype=torch.int16), torch.ones(2, 1)[:, :1]],
    ],
    ids=["tied", "expanded", "turned", "empty", "dtypes", "rare", "values"],
)
def test_any_tensor_is_copied_as_it_is(make: Callable[[], list[torch.Tensor]]) -> None:
    """Again and again in the same memory: bits, shapes, strides, and which of them share memory."""
    buffers = HostBuffers()
    for _ in range(3):
        originals = make()
        copies = buffers.copy(originals)
        for one, copied in zip(originals, copies, strict=True):
            assert (copied.shape, copied.stride(), copied.dtype) == (one.shape, one.stride(), one.dtype)
            bits = [tensor.detach().contiguous().view(torch.uint8).tolist() for tensor in (copied, one) if one.ndim]
            assert bits[:1] == bits[1:]
            assert not copied.requires_grad
        places = [{tensor.untyped_storage().data_ptr() for tensor in tensors} for tensors in (originals, copies)]
        assert len(places[0]) == len(places[1])
        assert not places[0] & places[1] - {0}
        buffers.release()


class Told:
    """A stream, or an event of one: notes what it is asked to do, in order."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def wait_stream(self, other: Told) -> None:
        self.order.append(f"{self.name} waits for {other.name}")

    def record(self, stream: Told) -> None:
        self.order.append(f"the end is recorded on {stream.name}")

    def synchronize(self) -> None:
        self.order.append("the host waits")


def test_a_cards_copy_lies_between_what_was_asked_before_and_what_is_asked_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of what is asked of a card; that it keeps to it is shown on one, in `tests/gpu`."""
    order: list[str] = []
    training, own = Told("the training", order), Told("the copy", order)

    @contextmanager
    def used(stream: Told) -> Iterator[None]:
        order.append(f"on {stream.name}")
        yield
        order.append(f"no more on {stream.name}")

    monkeypatch.setattr(staging, "_is_card", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "stream", used)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Told("the end", order))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: order.append(f"kept for {stream.name}"))
    buffers = HostBuffers()
    for _ in range(2):
        order.clear()
        copied = buffers.copy({"a": torch.ones(3), "b": torch.zeros(5)})
        each = ["on the copy", "no more on the copy", "kept for the copy"]
        before, after = "the copy waits for the training", "the training waits for the copy"
        assert order == [before, *each, *each, after, "the end is recorded on the copy"]
        buffers.wait()
        assert order[-1] == "the host waits"
        assert (copied["a"].tolist(), copied["b"].tolist()) == ([1] * 3, [0] * 5)
        buffers.release()


def test_memory_is_used_again_but_not_while_it_is_read() -> None:
    """The second copy lands where the first was, once that is released, and not before; what is too much goes."""
    buffers = HostBuffers()
    tensor = torch.ones(1000)
    first = buffers.copy({"a": tensor})["a"]
    second = buffers.copy({"a": tensor})["a"]
    assert first.data_ptr() != second.data_ptr()
    places = {first.data_ptr(), second.data_ptr()}
    buffers.release()
    assert buffers.copy(tensor).data_ptr() in places
    buffers.release()
    buffers.copy(torch.ones(10))
    assert not buffers._free


def begin(saver: Saver, step: int, files: dict[str, Any], metric: float | None = None) -> str | None:
    return saver.begin(
        Content(step, Position(0, step), metric=metric), background(lambda: files), lambda: None, drain=False
    )


class Gate:
    """What cannot be written before it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __deepcopy__(self, memo: object) -> Gate:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.opened.wait(30)
        return int, (0,)


def test_the_caller_waits_for_the_copy_only(tmp_path: Path) -> None:
    """The save is under way while the original changes; what is sealed is the old state; one save at a time."""
    saver = Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), None, None)
    saver.bests.tracked = Tracked("loss")
    weights, gate = torch.ones(3), Gate()
    assert begin(saver, 2, {"gate.pt": gate, "model.pt": {"weights": weights}, "note": b"plain"}, 0.5) == "step-2.e1.1"
    weights.zero_()
    assert not list(tmp_path.glob("*/MANIFEST.json"))
    assert saver.bests.best is None, "not before it is sealed"
    assert not saver.improves(0.6), "but what is under way counts"
    with pytest.raises(RuntimeError, match="settle that first"):
        begin(saver, 3, {})
    gate.opened.set()
    ended = saver.settle()
    assert ended is not None
    manifest = Manifest.read(tmp_path / "step-2.e1.1")
    assert ended == (2, manifest.ref)
    verify(tmp_path / manifest.name, manifest)
    assert torch.load(tmp_path / manifest.name / "model.pt", weights_only=True)["weights"].tolist() == [1, 1, 1]
    assert (tmp_path / manifest.name / "note").read_bytes() == b"plain"
    assert manifest.metric == 0.5
    assert saver.bests.best is not None
    assert saver.settle() is None


class OnCard(torch.Tensor):
    """Says that it lies on the second card."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


@pytest.mark.parametrize("running", [True, False])
def test_what_another_thread_reads_is_done_before(running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each card, in the stream of the loop; and CUDA is never started by that."""
    waited = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.synchronize = lambda: waited.append(str(device))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: running)
    monkeypatch.setattr(staging, "cards_in_use", lambda: [0, 2])
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    state = {"model.pt": {"weights": [torch.ones(2).as_subclass(OnCard), torch.ones(2)]}, "note": b""}
    staging.wait_for_cards(state)
    assert waited == (["cuda:0", "cuda:1", "cuda:2"] if running else [])


@pytest.mark.parametrize("waits", [True, False])
def test_the_thread_begins_behind_the_cards(waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the training's own tensors only where the loop waits for it; a card that failed fails the save."""
    asked, began = [], []
    monkeypatch.setattr(saving, "wait_for_cards", lambda state: asked.append((sorted(state), list(began))))
    flight = saving.Flight
    monkeypatch.setattr(saving, "Flight", lambda *args: began.append(1) or flight(*args))  # type: ignore[func-returns-value]
    saver = Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), None, None)

    def save(step: int) -> tuple[int, Any] | None:
        files = {"model.pt": {"weights": torch.ones(3)}}
        content = Content(step, Position(0, step))
        saver.begin(content, background(lambda: files), lambda: None, drain=False, waits=waits)
        return saver.settle()

    assert save(1) is not None
    assert asked == ([(["model.pt"], [])] if waits else [])

    def failed(state: Any) -> None:
        raise OSError("the card has failed")

    monkeypatch.setattr(saving, "wait_for_cards", failed)
    assert (save(2) is None) == waits


def test_a_full_disk_fails_the_save_and_not_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a write inside torch.save is told at the next settling; nothing of the save is left."""
    saver = Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), None, None)
    monkeypatch.setattr("os.fsync", _full)
    begin(saver, 1, {"model.pt": torch.zeros(100_000)})
    assert saver.settle() is None
    monkeypatch.undo()
    assert not list(tmp_path.glob("step-*"))
    begin(saver, 2, {"model.pt": torch.zeros(100_000)})
    ended = saver.settle()
    assert ended is not None
    assert ended[0] == 2


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_the_state_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    """A state that cannot be made is a mistake of the script's, and leaves nothing."""

    def broken() -> dict[str, Any]:
        raise KeyError("model")

    saver = Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), None, None)
    with pytest.raises(SaveError, match="KeyError: 'model'"):
        saver.begin(Content(1, Position()), background(broken), lambda: None, drain=False)
    assert not list(tmp_path.glob("step-*"))
    assert background(broken).state is broken


@pytest.mark.parametrize(
    "path", ["", "/model.pt", "../model.pt", "a//b", "MANIFEST.json", "rng/rank-0.json", "parts/x"]
)
def test_files_stay_below_the_checkpoint_and_off_the_sessions_own(path: str) -> None:
    """A path that leads elsewhere is refused with its name."""
    with pytest.raises(ValueError, match=r"path below|choose another name"):
        check_paths({path: 1})


def test_nothing_is_written_before_it_is_copied(tmp_path: Path) -> None:
    """The thread waits for the copy, and a card that fails meanwhile fails the save."""
    from dalsegno.elastic.saving.background_save import Flight

    copied = threading.Event()

    def wait() -> None:
        assert copied.wait(30)

    flight = Flight(tmp_path, 0, 1, {"model.pt": b"0"}, wait, lambda entries: "", Count(0), 0.0, nullcontext())
    assert not flight.wait(0.1)
    assert not list(tmp_path.iterdir())
    copied.set()
    assert flight.written() is None
    flight.cancel()

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    failed = Flight(tmp_path, 0, 1, {"other.pt": b"0"}, fail, lambda entries: "", Count(0), 0.0, nullcontext())
    assert "illegal memory access" in str(failed.written())
    assert failed.failed
    assert not (tmp_path / "other.pt").exists()


@pytest.mark.slow
def test_all_parts_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 seals once every rank has said what it wrote, and torn words are none; a cancelled one never seals."""
    from dalsegno.elastic.saving.background_save import Flight

    sealed: list[tuple[str, ...]] = []

    def seal(entries: Any) -> str:
        sealed.append(tuple(entry.path for entry in entries))
        return "digest"

    flight = Flight(tmp_path, 0, 2, {"model.pt": b"0"}, lambda: None, seal, Count(0), 0.0, nullcontext())
    assert flight.written() is None
    (tmp_path / "parts" / "rank-1.json").write_bytes(b'{"files": [')
    assert not flight.wait(0.3)
    (tmp_path / "parts" / "rank-1.json").write_bytes(b'{"files": []}\n')
    assert flight.sealed() == ("digest", None)
    assert sealed == [("model.pt", "parts/rank-0.json", "parts/rank-1.json")]
    other = tmp_path / "other"
    other.mkdir()
    flight = Flight(other, 0, 2, {}, lambda: None, seal, Count(0), 0.0, nullcontext())
    assert flight.written() is None
    flight.cancel()
    assert len(sealed) == 1
    assert saving.Flight is Flight


@pytest.mark.parametrize("was", [True, False], ids=["on", "off"])
def test_no_garbage_is_looked_for_while_a_state_is_copied(was: bool) -> None:
    """With thousands of tensors that took longer than the copies. Afterwards it is as before, whatever happened."""
    seen: list[bool] = []

    def state() -> dict[str, object]:
        seen.append(gc.isenabled())
        raise KeyError("layer")

    def copy(given: object) -> object:
        seen.append(gc.isenabled())
        return given

    before = gc.isenabled()
    (gc.enable if was else gc.disable)()
    try:
        background(lambda: {}).staged(copy, Path())
        with pytest.raises(KeyError):
            background(state).staged(copy, Path())
        assert gc.isenabled() is was
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, False]
