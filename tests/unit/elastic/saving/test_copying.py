"""Copies of many tensors with several threads: all of them, once, and errors are heard of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dalsegno.elastic.saving import copying
from dalsegno.elastic.saving.staging import HostBuffers


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with free cores, with small pieces."""
    monkeypatch.setattr(copying, "cores", lambda: 3)
    monkeypatch.setattr(copying, "LEAST", 0)
    monkeypatch.setattr(copying, "PIECES", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def sources() -> list[torch.Tensor]:
    """Of all sizes, of which some are cut and some go together; a leaf of a graph, too."""
    sizes = [1, 7, 1024, 5000, 100_003, 0, 3 * 4096, 64]
    found = [torch.randn(size) for size in sizes]
    return [*found, torch.randn(130, 70, dtype=torch.float64), torch.randn(99, requires_grad=True), torch.tensor(3)]


@pytest.mark.parametrize("streamed", [0, 4096, 1 << 30])
@pytest.mark.parametrize("cores", [1, 2, 3, 16])
def test_all_of_it_is_copied(cores: int, streamed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "cores", lambda: cores)
    monkeypatch.setattr(copying, "STREAMED", streamed)
    for _ in range(20):
        given = sources()
        targets = [torch.full_like(tensor, 2, requires_grad=False) for tensor in given]
        copying.copy_all(targets, given)
        assert all(torch.equal(target, source) for target, source in zip(targets, given, strict=True))


def test_large_tensors_are_copied_by_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gets the others of a piece."""
    monkeypatch.setattr(copying, "STREAMED", 40_000)
    copied, by_torch, copy = list[int](), list[int](), torch._foreach_copy_
    monkeypatch.setattr(copying.ctypes, "memmove", lambda target, source, size: copied.append(size))
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, given: (by_torch.extend(one.nbytes for one in given), copy(to, given))
    )
    given = [torch.ones(size) for size in (10, 9_999, 10_000, 5, 20_000)]
    copying._copy([torch.zeros_like(tensor) for tensor in given], given)
    assert (copied, by_torch) == ([40_000, 80_000], [40, 39_996, 20])


def test_torch_copies_where_it_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(copying, "_copy", None)
    given = sources()
    targets = [torch.zeros_like(tensor) for tensor in given]
    copying.copy_all(targets, given)
    assert all(torch.equal(target, source) for target, source in zip(targets, given, strict=True))


def test_who_has_not_begun_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its core has something else to do. When it begins at last, nothing is left for it."""
    late: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    monkeypatch.setattr(copying._thread, "start_new_thread", lambda work, given: late.append((work, given)))
    given = sources()
    targets = [torch.zeros_like(tensor) for tensor in given]
    copying.copy_all(targets, given)
    assert all(torch.equal(target, source) for target, source in zip(targets, given, strict=True))
    with torch.no_grad():
        given[4].add_(1.0)
    assert len(late) == 2
    for work, arguments in late:
        work(*arguments)
    assert not torch.equal(targets[4], given[4])


def test_pieces_under_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller changes the sources as soon as it goes on."""
    copy, begun, may_end = torch._foreach_copy_, threading.Event(), threading.Event()

    def slow(targets: Any, given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            may_end.wait(10)
        else:
            begun.wait(10)
            threading.Timer(0.2, may_end.set).start()
        copy(targets, given)

    monkeypatch.setattr(torch, "_foreach_copy_", slow)
    given = sources()
    targets = [torch.zeros_like(tensor) for tensor in given]
    copying.copy_all(targets, given)
    assert may_end.is_set()
    assert all(torch.equal(target, source) for target, source in zip(targets, given, strict=True))


def test_an_error_of_any_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(targets: Any, given: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "_foreach_copy_", fails)
    given = sources()
    with pytest.raises(RuntimeError, match="no memory"):
        copying.copy_all([torch.zeros_like(tensor) for tensor in given], given)


def test_who_cannot_start_more_threads_copies_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And waits for them: a copy that is left early is written to behind the next one."""
    monkeypatch.setattr(copying, "cores", lambda: 4)
    start, started = copying._thread.start_new_thread, list[int]()

    def limited(work: Any, given: Any) -> int:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(start(work, given))
        return started[0]

    monkeypatch.setattr(copying._thread, "start_new_thread", limited)
    given = sources()
    targets = [torch.zeros_like(tensor) for tensor in given]
    copying.copy_all(targets, given)
    assert len(started) == 1
    assert all(torch.equal(target, source) for target, source in zip(targets, given, strict=True))


def test_buffers_of_a_copy_that_failed_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that helped with it may write to them yet."""
    given, buffers = {"a": torch.ones(50_000), "b": torch.ones(3, 4).t()}, HostBuffers()
    buffers.copy(given)
    buffers.release()
    seen: list[torch.Tensor] = []

    def fails(targets: list[torch.Tensor], given: Any) -> None:
        seen.extend(targets)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dalsegno.elastic.saving.staging.copy_all", fails)
        with pytest.raises(KeyboardInterrupt):
            buffers.copy(given)
    buffers.release()
    again = buffers.copy(given)
    assert seen
    assert {tensor.data_ptr() for tensor in seen}.isdisjoint(tensor.data_ptr() for tensor in again.values())


def test_a_copy_in_inference_mode_leaves_buffers_for_other_modes() -> None:
    """Of a callback that evaluates, and saves if the model is the best."""
    given, buffers = {"a": torch.ones(50_000)}, HostBuffers()
    with torch.inference_mode():
        first = buffers.copy({**given, "b": torch.ones(10)})
    assert torch.equal(first["a"], given["a"])
    buffers.release()
    given["a"].add_(1.0)
    assert torch.equal(buffers.copy(given)["a"], given["a"])
    buffers.release()
    with torch.inference_mode():
        assert torch.equal(buffers.copy(given)["a"], given["a"])


def test_pieces_are_of_about_one_size() -> None:
    """What is large is cut, and what is small goes together."""
    given = sources()
    pieces = copying._pieces([torch.zeros_like(tensor) for tensor in given], given, 4096)
    sizes = [sum(tensor.nbytes for tensor in some) for _, some in pieces]
    assert sum(sizes) == sum(tensor.nbytes for tensor in given)
    assert max(sizes) <= 3 * 4096
