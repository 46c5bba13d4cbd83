"""How all ranks come to refuse what one of them does: who is told what, and who waits for whom."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dalsegno.elastic.rank import meetings, remarks
from dalsegno.elastic.rank.agreement import Refusal, Trouble
from dalsegno.elastic.rank.collective import OtherThread, PeerLost, Solo
from dalsegno.elastic.rank.envelopes import Statement, judge
from dalsegno.elastic.rank.meetings import PATIENCE_SECONDS, Meetings, SessionOver, watch_for_refusals, watch_the_end
from tests.support.workers.fake_link import FakeLink


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """How often the threads of this process were to be looked at behind its end. It is pytest's, and they are not."""
    found: list[bool] = []
    monkeypatch.setattr(meetings, "let_no_thread_delay", lambda code: found.append(True))
    return found


class Others(Solo):
    """Another rank that comes to each meeting, with a problem or without; or never."""

    def __init__(self, problem: str = "", *, final: bool = True, gone: bool = False) -> None:
        self.answer = Statement(problem=problem, final=final)
        self.gone, self.patience = gone, list[float | None]()

    def meet(self, said: Statement, *, patience_seconds: float | None = None) -> None:
        self.patience.append(patience_seconds)
        if self.gone:
            raise RuntimeError("timed out")
        judge([said, self.answer])


def met(others: Others) -> tuple[Meetings, FakeLink]:
    agent = FakeLink()
    return Meetings(others, agent), agent  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["together", "telling"])
def test_the_others_hear_of_a_mistake(how: str) -> None:
    """It keeps its type here; the agent hears that all refuse, in one line."""
    others = Others()
    one, agent = met(others)
    with pytest.raises(KeyError), getattr(one, how)():
        raise KeyError("another\nmodel")
    assert [message.refused.message for message in agent.said] == ["'another\\nmodel' (rank 0)"]
    assert others.patience == [PATIENCE_SECONDS]


@pytest.mark.parametrize("wrapped", [False, True])
def test_blocks_in_blocks_tell_once(wrapped: bool) -> None:
    """As a `Trainer` that loads, whose strategy checks the model: who has heard it comes to no other meeting."""
    others = Others()
    one, agent = met(others)

    def checks() -> None:
        try:
            with one.together():
                raise ValueError("another model")
        except ValueError as error:
            if wrapped:
                raise ValueError("it holds another model") from error
            raise

    with pytest.raises(ValueError, match="another model"), one.telling():
        checks()
    assert others.patience == [PATIENCE_SECONDS]
    assert len(agent.said) == 1
    again = ValueError("the next one")
    for times in (2, 3):
        with pytest.raises(ValueError, match="next"), one.telling():
            raise again
        assert len(agent.said) == times


def test_this_rank_hears_of_theirs() -> None:
    """Where a meeting ends the block; else at the next one. Nobody is told twice."""
    one, agent = met(Others("another model"))
    with pytest.raises(Refusal, match=r"another model \(rank 1\)"), one.together():
        pass
    with one.telling():
        pass
    with pytest.raises(Refusal), one.telling():
        one.compare({})
    assert [message.refused.message for message in agent.said] == ["another model (rank 1)"] * 2


@pytest.mark.parametrize("error", [OSError("stale file handle"), MemoryError(), RuntimeError("CUDA error")])
def test_what_another_start_may_mend_is_nobodys_refusal(error: Exception) -> None:
    """Neither told to the others, whom the agents will end, nor to the agent."""
    others = Others()
    one, agent = met(others)
    with pytest.raises(type(error)), one.together():
        raise error
    assert (agent.said, others.patience) == ([], [])


def test_a_problem_that_is_not_final_ends_all_and_is_no_refusal() -> None:
    one, agent = met(Others("the disk is full", final=False))
    with pytest.raises(Trouble, match=r"the disk is full \(rank 1\)"):
        one.compare({})
    assert agent.said == []


def test_others_that_do_not_come_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a collective of another group: this rank ends with its own error, and its process at once."""
    codes: list[int] = []
    monkeypatch.setattr(meetings, "insist", codes.append)
    one, agent = met(Others(gone=True))
    with pytest.raises(ValueError, match="another model"), one.together():
        raise ValueError("another model")
    assert (codes, agent.said) == ([1], [])


class Slow(Others):
    """Comes when this rank has said a line, if it is to say one."""

    def __init__(self, told: threading.Event) -> None:
        super().__init__()
        self._told = told

    def meet(self, said: Statement, *, patience_seconds: float | None = None) -> None:
        if said.problem:
            assert self._told.wait(60)
        super().meet(said, patience_seconds=patience_seconds)


@pytest.mark.parametrize("problem", ["", "the first batch could not be made"])
def test_a_rank_that_waits_with_a_problem_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    """The others may be in a barrier of the script's own, and nothing else would tell what they wait for."""
    monkeypatch.setattr(meetings, "SAY_SECONDS", 0.0)
    told, plain = threading.Event(), remarks.remark

    def remark(text: str) -> None:
        plain(text)
        told.set()

    monkeypatch.setattr(remarks, "remark", remark)
    one, _ = met(Slow(told))
    with pytest.raises(Refusal) if problem else nullcontext():
        one.compare({}, problem)
    said = [line for line in caplog.messages if "rank 0 cannot go on" in line]
    assert len(said) == bool(problem)
    assert all(problem in line for line in said)


def caused(text: str) -> OSError:
    """What the verification makes of such an error, as frameworks that reject a state raise the same."""
    error = OSError("the ranks could not tell each other what they have verified")
    error.__cause__ = RuntimeError(text)
    return error


class Lost(Solo):
    """A group that has lost a peer, or not."""

    def __init__(self, lost: bool) -> None:
        self.lost, self.asked = lost, 0

    def has_lost_a_peer(self) -> bool:
        self.asked += 1
        return self.lost


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize(
    ("error", "asks"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (torch.distributed.DistNetworkError("The client socket has timed out"), True),
        (PeerLost("its notice is over"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (NotImplementedError("no such operator"), False),
        (ValueError("Connection closed by peer"), False),
        (OSError("Connection reset by peer"), False),
        (caused("Connection closed by peer"), True),
    ],
)
def test_the_agent_hears_whose_end_it_was(
    monkeypatch: pytest.MonkeyPatch, error: Exception, asks: bool, lost: bool
) -> None:
    """By the connections, where a collective may raise such an error: never by its words."""
    link: Any = FakeLink()
    monkeypatch.setattr(meetings, "_at_the_end", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    group = Lost(lost)
    heard: list[bool] = []
    watch_the_end(Meetings(group, link), lambda: heard.append(True))
    sys.excepthook(type(error), error, None)
    assert group.asked == int(asks)
    assert heard == [True] * (asks and lost)
    assert [message.WhichOneof("body") for message in link.said] == ["peer_lost"] * (asks and lost)


@pytest.mark.parametrize("lost", [True, False])
def test_a_refusal_made_of_a_peers_end_is_none(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """What a framework says as it loads may be what gloo says of a closed connection: the connections tell."""
    link: Any = FakeLink()
    monkeypatch.setattr(meetings, "_at_the_end", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    group = Lost(lost)
    heard: list[bool] = []
    watch_the_end(Meetings(group, link), lambda: heard.append(True))
    made = "try:\n    raise RuntimeError('Closed')\nexcept RuntimeError as error:\n    raise ValueError from error"
    try:
        exec(made, {"__name__": "dalsegno.elastic.trainer.trainer"})
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    assert group.asked == 1
    assert heard == [True] * lost
    assert [message.WhichOneof("body") for message in link.said] == ["peer_lost" if lost else "refused"]


@pytest.mark.parametrize(
    ("raises", "told"),
    [
        ("from dalsegno.elastic import BatchPlan\nBatchPlan(0, 1, 4)", True),
        ("raise ValueError('the script itself')", False),
        ("import json\njson.loads('{')", False),
        ("from dalsegno.elastic.rank.agreement import Refusal\nraise Refusal('no')", True),
        ("exec('raise ValueError(1)', {'__name__': 'dalsegno.swift_plugin.hf.refusals'})", True),
        ("raise RuntimeError('a peer went away')", False),
    ],
)
def test_what_we_refuse_outside_of_meetings_is_told_too(
    monkeypatch: pytest.MonkeyPatch, raises: str, told: bool
) -> None:
    """By where it is raised; what the script or a library raises may go otherwise the next time."""
    link: Any = FakeLink()
    shown: list[BaseException] = []
    monkeypatch.setattr(meetings, "_at_the_end", [])
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    watch_the_end(Meetings(Solo(), link), lambda: None)
    try:
        exec(raises, {"__name__": "__main__"})
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert (len(shown), bool(link.said)) == (1, told)


@pytest.mark.parametrize("has_session", [False, True])
def test_before_a_session_refusals_are_told_too(monkeypatch: pytest.MonkeyPatch, has_session: bool) -> None:
    """A session that comes later tells them itself."""
    told: list[str] = []
    link: Any = FakeLink()
    monkeypatch.setattr(meetings, "_at_the_end", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    watch_for_refusals(told.append)
    if has_session:
        watch_the_end(Meetings(Solo(), link), lambda: None)
        watch_for_refusals(told.append)
    for raises in ("from dalsegno.elastic import BatchPlan\nBatchPlan(0, 1, 4)", "raise ValueError('the script')"):
        try:
            exec(raises, {"__name__": "__main__"})
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    assert (len(told), len(link.said)) == ((0, 1) if has_session else (1, 0))


@pytest.mark.parametrize("how", ["check_thread", "compare"])
def test_another_thread_is_refused_where_there_may_be_more_ranks(how: str) -> None:
    """Also in a world of one rank under an agent, which hears of it: no exception in a thread ends a process."""
    agent: Any = FakeLink()
    calls = {"check_thread": Meetings.check_thread, "compare": lambda meetings: meetings.compare({})}
    with ThreadPoolExecutor(1) as thread:
        thread.submit(calls[how], Meetings(Solo(), None)).result()  # one rank that stays alone
        with pytest.raises(OtherThread, match="call it, and the loop, there"):
            thread.submit(calls[how], Meetings(Solo(), agent)).result()
    assert [one.message for one in agent.of("refused")] == [str(OtherThread())]
    calls[how](Meetings(Solo(), agent))


@pytest.mark.parametrize(("agent", "says"), [(None, "put `with session"), (FakeLink(), "a dlrover-run of its own")])
def test_what_a_session_that_is_over_says(agent: Any, says: str) -> None:
    """Under an agent a block around each run would change nothing."""
    one = Meetings(Solo(), agent)
    one.check_open(7)
    one.over = True
    with pytest.raises(SessionOver, match=f"at step 7.*{says}"):
        one.check_open(7)


@pytest.mark.parametrize(
    ("error", "decided", "told"),
    [(SessionOver("each"), False, True), (SessionOver("each"), True, False), (Refusal("of the script"), False, False)],
)
def test_a_second_run_in_a_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, watched: list[bool], error: Exception, decided: bool, told: bool
) -> None:
    """Another start would end there, too. Behind a drain the run goes on, whatever the script does meanwhile.

    No rank waits any more for what a session that is over does: its threads may end their work.
    """
    link: Any = FakeLink()
    monkeypatch.setattr(meetings, "_at_the_end", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(meetings, "is_decided", lambda: decided)
    one = Meetings(Solo(), link)
    watch_the_end(one, lambda: None)
    one.over = True
    sys.excepthook(type(error), error, None)
    assert [said.message for said in link.of("refused")] == ["each"] * told
    assert watched == []
