"""What an agent tries again: its name, its Join, and what a master that lost its store asks for anew."""

from __future__ import annotations

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.decisions.state import Workers
from dalsegno.protos import control_pb2
from tests.unit.agent.decisions.test_decisions import GATHER, ME, Agent, kinds, world

TAKEN = ev.Refused("ALREADY_EXISTS", "node name 'me' is held by a live node")
REPLY = control_pb2.RegisterReply(generation=1, node="me-1")


# ---- its name -------------------------------------------------------------------------------------------------------


def fenced(node_name: str = "") -> Agent:
    """It was declared dead and has asked for its name again."""
    agent = Agent(node_name=node_name).registered()
    agent.directed(fenced=control_pb2.Fenced(reason="silent"))
    assert agent.did(ev.Register) == [ev.Register("", node_name), ev.Register(ME, "me")]
    return agent


def test_a_name_that_the_master_gave_is_only_a_wish() -> None:
    """Somebody took it meanwhile: any other will do."""
    agent = fenced()
    assert agent.hear(TAKEN) == [ev.Register(ME, "")]
    agent.hear(ev.Registered("me.2", REPLY))
    assert agent.state.node == "me-1"
    assert not agent.did(ev.Exit)


def test_a_name_of_the_users_is_waited_for_and_then_given_up() -> None:
    """One line; asked again every two seconds; a minute later it ends."""
    agent = fenced("me")
    assert kinds(agent.hear(TAKEN)) == ["Say"]
    assert agent.waits(1.0) == []
    attempts = 0
    while not agent.did(ev.Exit):
        assert agent.waits(2.1) == [ev.Register(ME, "me")]
        agent.hear(TAKEN)
        attempts += 1
        assert attempts < 40
    assert attempts >= 25
    assert agent.did(ev.Exit) == [ev.Exit(ev.EXIT_USAGE, TAKEN.detail)]
    assert len([say for say in agent.did(ev.Say) if "waits for it" in say.text]) == 1


def test_a_node_that_was_fenced_for_good_ends() -> None:
    """That is no wrong input: it leaves, and says that steps since the last save are lost."""
    agent = fenced()
    agent.hear(ev.Refused("PERMISSION_DENIED", "this node was fenced for good"))
    assert agent.did(ev.Exit) == [ev.Exit(ev.EXIT_LEFT_UNSAVED, "this node was fenced for good")]
    agent = Agent(node_name="")
    agent.hear(ev.Started(), ev.Refused("PERMISSION_DENIED", "somebody in between says so"))
    assert agent.did(ev.Exit)[0].code == ev.EXIT_USAGE


def test_a_name_that_is_held_at_the_start_is_asked_for_a_little_longer() -> None:
    """Without a word: it may be its own predecessor's, whose death nobody has noticed yet."""
    agent = Agent(node_name="me")
    agent.hear(ev.Started(), TAKEN)
    for _ in range(4):
        assert agent.waits(0.6) == [ev.Register("", "me")]
        agent.hear(TAKEN)
    assert agent.did(ev.Say) == agent.did(ev.Exit) == []
    agent.waits(0.6)
    assert kinds(agent.hear(TAKEN)) == ["Exit"]
    agent = Agent(node_name="me")
    agent.hear(ev.Started(), TAKEN)
    agent.waits(0.6)
    agent.hear(ev.Registered("me.1", REPLY))
    assert agent.waits(100) == []
    assert not agent.did(ev.Exit)


def test_a_name_that_becomes_free_is_taken() -> None:
    """And the next time it is waited for anew."""
    agent = fenced("me")
    agent.hear(TAKEN)
    agent.waits(2.1)
    agent.hear(ev.Registered("me.2", REPLY))
    assert agent.waits(100) == []
    assert agent.state.door.name_deadline is None


# ---- its Join -------------------------------------------------------------------------------------------------------


def test_a_join_that_cannot_be_prepared_is_tried_again_every_second() -> None:
    """The person hears of it once."""
    agent = Agent().registered()
    assert kinds(agent.directed(gather=GATHER)) == ["PrepareJoin"]
    for attempt in range(3):
        failed = agent.hear(ev.JoinFailed(2, "d3", "no store can be served"))
        assert kinds(failed) == (["Say"] if attempt == 0 else [])
        assert agent.waits(0.5) == []
        assert kinds(agent.waits(0.6)) == ["PrepareJoin"]
    assert kinds(agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", ()))) == ["Join"]
    assert agent.waits(10) == []


def test_a_failure_to_prepare_an_older_join_changes_nothing() -> None:
    """The present one is under way."""
    agent = Agent().registered()
    agent.directed(gather=GATHER)
    assert agent.hear(ev.JoinFailed(1, "d3", "no store")) == []
    assert agent.waits(10) == []


def blind(**more: control_pb2.Checkpoint) -> Agent:
    """A node that does not see the directory has sent its Join."""
    agent = Agent().registered()
    wait = control_pb2.Wait(reason="me does not see the job's checkpoint directory", round=1)
    agent.directed(wait=wait, **more)
    agent.hear(ev.JoinPrepared(1, "", "h", 7, "other probe", ()))
    return agent


def test_a_node_that_does_not_see_the_directory_looks_again() -> None:
    """Every five seconds, while no checkpoint can be named to look for; not while nobody would hear it."""
    agent = blind()
    assert agent.waits(4.0) == []
    assert kinds(agent.waits(1.1)) == ["PrepareJoin"]
    assert agent.waits(20.0) == [], "the first look has not ended"
    assert kinds(agent.hear(ev.JoinPrepared(1, "", "h", 8, "other probe", ()))) == ["Join"]
    assert kinds(agent.waits(5.1)) == ["PrepareJoin"]
    agent.hear(ev.LinkChanged(False), ev.JoinPrepared(1, "", "h", 9, "other probe", ()))
    assert agent.waits(5.1) == []


@pytest.mark.parametrize("change", ["head", "run"])
def test_a_node_with_something_else_to_do_does_not_look_again(change: str) -> None:
    """Once there is a commit the order names what to look for; a spare of a full world just waits."""
    agent = blind()
    if change == "head":
        agent = blind(head=control_pb2.Checkpoint(step=3))
    else:
        agent.directed(run=world())
    assert "PrepareJoin" not in kinds(agent.waits(6.0))


# ---- a master that lost its store -----------------------------------------------------------------------------------


def test_a_master_without_memory_is_obeyed() -> None:
    """It counts verifications and notices from 1 again, under a higher generation."""
    agent = Agent().registered()
    notices = [control_pb2.Notice(sequence=n, text=f"old {n}") for n in range(1, 9)]
    agent.directed(wait=control_pb2.Wait(), verify=control_pb2.Verification(number=4), notices=notices)
    news = [control_pb2.Notice(sequence=1, text="new")]
    agent.directed(generation=2, wait=control_pb2.Wait(), notices=news)
    assert [say.text for say in agent.did(ev.Say)] == ["new"]
    for _ in range(2):
        agent.directed(generation=2, wait=control_pb2.Wait(), verify=control_pb2.Verification(number=1), notices=news)
    assert [action.verification.number for action in agent.did(ev.Verify)] == [4, 1]
    assert [say.text for say in agent.did(ev.Say)] == ["new"]


def test_a_master_with_its_store_repeats_no_news() -> None:
    """A restart alone is no news."""
    agent = Agent().registered()
    notices = [control_pb2.Notice(sequence=n, text=f"old {n}") for n in range(1, 9)]
    agent.directed(wait=control_pb2.Wait(), notices=notices)
    agent.directed(generation=2, wait=control_pb2.Wait(), notices=notices)
    assert agent.did(ev.Say) == []


def test_a_master_that_came_with_a_new_registration_is_new_too() -> None:
    """The generation was known from the registration before the first directive came."""
    agent = Agent().registered()
    agent.directed(wait=control_pb2.Wait(), verify=control_pb2.Verification(number=4))
    agent.hear(ev.CallFailed("Heartbeat", "NOT_FOUND", "not registered"))
    agent.hear(ev.Registered("me.2", control_pb2.RegisterReply(generation=2, node="me")))
    agent.directed(generation=2, wait=control_pb2.Wait(), verify=control_pb2.Verification(number=1))
    assert len(agent.did(ev.Verify)) == 2


def test_the_pauses_are_what_the_tests_take_them_for() -> None:
    """In seconds."""
    assert (handling.JOIN_PAUSE_SECONDS, handling.LOOK_AGAIN_SECONDS, handling.NAME_PAUSE_SECONDS) == (1.0, 5.0, 2.0)


# ---- a master that does not answer ----------------------------------------------------------------------------------


def test_a_master_that_never_answers_ends_the_agent() -> None:
    """One line, once the time for the first answer is over, and one before, because nothing is silent for so long."""
    agent = Agent(connect_timeout=20.0, addresses="h:1")
    agent.hear(ev.Started())
    assert agent.waits(4.0) == []
    said = "no master has answered yet at h:1: trying for 15 s more (--connect-timeout)"
    assert agent.waits(1.0) == [ev.Say(said)]
    assert agent.waits(14.0) == []
    (ending,) = agent.waits(1.0)
    assert isinstance(ending, ev.Exit)
    assert ending.code == ev.EXIT_USAGE
    assert "no master answered within 20 s" in ending.message


def test_a_directory_that_is_looked_at_again_is_no_silent_master() -> None:
    """Nobody is asked before it can be read: the line, and the end with 2, named a master that had heard nothing."""
    agent = Agent(connect_timeout=10.0, addresses="h:1", reads=False)
    agent.hear(ev.Started())
    said = ev.Say("it does not register yet, and looks again for some seconds: a stale handle", True)
    assert agent.hear(ev.LooksAgain("a stale handle")) == [said]
    assert agent.waits(10.0) == agent.hear(ev.LooksAgain("a stale handle")) == agent.waits(10.0) == []
    agent.hear(ev.Asked())
    assert agent.waits(4.0) == []
    assert kinds(agent.waits(1.0)) == ["Say"]
    assert kinds(agent.waits(5.0)) == ["Exit"]


def test_a_directory_that_does_not_answer_is_no_silent_master() -> None:
    """A mount whose server is away may take minutes for one look."""
    agent = Agent(connect_timeout=10.0, addresses="h:1", reads=False)
    agent.hear(ev.Started())
    assert agent.waits(4.0) == []
    (said,) = agent.waits(1.0)
    assert isinstance(said, ev.Say)
    assert "the checkpoint directory does not answer" in said.text
    assert agent.hear(ev.LooksAgain("too late")) == agent.waits(200.0) == []
    agent.hear(ev.Asked())
    assert kinds(agent.waits(5.0)) == ["Say"]
    agent.hear(ev.Registered("me.1", REPLY), ev.Asked())
    assert agent.waits(100.0) == []


def test_who_gave_only_an_endpoint_hears_how_a_node_hosts_a_master() -> None:
    """As torchrun's nodes do, whose --rdzv-backend a person may have left out."""
    agent = Agent(connect_timeout=20.0, addresses="h:1", hint="; so and so")
    agent.hear(ev.Started())
    agent.waits(5.0)
    (ending,) = agent.waits(15.0)
    assert isinstance(ending, ev.Exit)
    assert ending.message == "no master answered within 20 s: is it running at that address? (h:1); so and so"


def test_who_follows_a_variable_hears_of_another_launchers_only_where_one_answers() -> None:
    """A master of ours that is late would be given up for a second one, if the line said to unset the variable."""
    silent = Agent(connect_timeout=20.0, addresses="h:1", hint="; V names it", advice=", as theirs: unset it")
    silent.hear(ev.Started())
    silent.waits(5.0)
    (ending,) = silent.waits(15.0)
    assert isinstance(ending, ev.Exit)
    assert ending.message == "no master answered within 20 s: is it running at that address? (h:1); V names it"
    stranger = Agent(connect_timeout=20.0, addresses="h:1", hint="; V names it", advice=", as theirs: unset it")
    (ending,) = stranger.hear(ev.Started(), ev.Refused("UNIMPLEMENTED", "Method not found!"))[-1:]
    assert isinstance(ending, ev.Exit)
    what = "what answers at h:1 is not Dal Segno's dlrover-master"
    assert ending.message == f"{what}; V names it, as theirs: unset it"


def test_the_jobs_own_master_has_no_address_that_could_be_wrong() -> None:
    """It is looked for in the checkpoint directory, where its log says why it is silent."""
    agent = Agent(connect_timeout=20.0)
    agent.hear(ev.Started())
    said = "the job's own master has not answered yet: trying for 15 s more (--connect-timeout)"
    assert agent.waits(5.0) == [ev.Say(said)]
    (ending,) = agent.waits(15.0)
    assert isinstance(ending, ev.Exit)
    assert ending.message == "no master answered within 20 s: a line above, or its master.log, says why"


def test_an_answered_agent_outlives_every_attempt() -> None:
    """A name that was held at first: no attempt's deadline is left behind, however long the agent lives."""
    agent = Agent(node_name="me", connect_timeout=20.0)
    agent.hear(ev.Started(), TAKEN)
    assert agent.waits(0.6) == [ev.Register("", "me")]
    agent.hear(ev.Registered("me.1", REPLY))
    assert agent.state.wake is None
    assert agent.waits(1000.0) == []


def test_every_attempt_has_the_whole_time() -> None:
    """The master that said the name is held may be gone when the agent asks again."""
    agent = Agent(node_name="me", connect_timeout=20.0)
    agent.hear(ev.Started())
    agent.waits(19.0)
    agent.hear(TAKEN)
    assert agent.waits(2.0) == [ev.Register("", "me")]
    assert agent.waits(18.0) == []
    assert kinds(agent.waits(1.0)) == ["Exit"]


@pytest.mark.parametrize("at", [0.0, 3.0, 12.0, 19.9])
def test_time_in_which_the_agent_was_stopped_does_not_count(at: float) -> None:
    """Ctrl-Z, the master is started in the same terminal, `fg`: nobody was asked meanwhile. It ended with 2."""
    agent = Agent(connect_timeout=20.0, addresses="h:1")
    agent.hear(ev.Started())
    agent.waits(at)
    assert "Exit" not in kinds(agent.stands_still(100.0))
    # What is left, and enough to ask once more.
    assert "Exit" not in kinds(agent.waits(max(4.0, 18.0 - at)))
    assert agent.state.door.answer_deadline is not None
    assert "Exit" in kinds(agent.waits(4.0))


@pytest.mark.parametrize("behind", [2.0, 100.0])
def test_the_end_of_workers_that_lies_unread_counts(behind: float) -> None:
    """Ctrl-Z while they are stopped, `fg`: a line said that some might be left, stuck in the kernel."""
    agent = Agent().registered().running()
    agent.directed(gather=control_pb2.Gather(round=2))
    assert agent.state.workers is Workers.STOPPING
    assert agent.stands_still(agent.state.stop_deadline - agent.now + behind) == []
    agent.hear(ev.WorkersStopped(1))
    assert not [one for one in agent.did(ev.Say) if "stuck in the kernel" in one.text]


@pytest.mark.parametrize("left", [-100.0, 6.0, 20.0])
def test_what_workers_saved_is_taken_behind_a_stop(left: float) -> None:
    """Ctrl-Z while it is copied, `fg`: they counted as stuck soon after that, and it was not waited for."""
    agent = Agent(save_timeout=10.0, adopts=True).registered().running()
    agent.directed(gather=control_pb2.Gather(round=2))
    assert agent.stands_still(agent.state.stop_deadline - agent.now - left) == []
    assert agent.waits(50.0) == []
    agent.hear(ev.WorkersStopped(1))
    assert not [one for one in agent.did(ev.Say) if "stuck in the kernel" in one.text]


def test_workers_that_do_not_end_are_given_up_behind_a_stop() -> None:
    """It is waited for once more."""
    agent = Agent().registered().running()
    agent.directed(gather=control_pb2.Gather(round=2))
    assert agent.stands_still(100.0) == []
    assert "Say" in kinds(agent.stands_still(100.0))
    assert agent.state.workers is Workers.NONE


def test_an_answer_that_comes_behind_a_stop_counts() -> None:
    """Also where something else is heard first, and where it was stopped more than once."""
    agent = Agent(connect_timeout=20.0)
    agent.hear(ev.Started())
    for _ in range(3):
        agent.now += 100.0
        assert "Exit" not in kinds(agent.hear(ev.StandbyWarm()) + agent.waits(3.0))
    assert kinds(agent.hear(ev.Registered("me.1", REPLY))) == ["ReportWarm"]


@pytest.mark.parametrize("late", [1.5, 3.0, 5.0, 8.0])
def test_a_machine_that_is_always_slow_comes_to_an_end(late: float) -> None:
    """It wakes late each time, as where too much runs on it: each look still takes its second from the time."""
    agent = Agent(connect_timeout=20.0)
    agent.hear(ev.Started())
    looks = 0
    while "Exit" not in kinds(agent.stands_still(1.0 + late)):
        looks += 1
        assert looks < 30


def test_an_answer_that_lies_unread_counts() -> None:
    """The agent was held up past its deadline: what it hears first is not taken for silence."""
    agent = Agent(connect_timeout=20.0)
    agent.hear(ev.Started())
    agent.now += 30.0
    assert kinds(agent.hear(ev.StandbyWarm())) == []
    assert kinds(agent.hear(ev.Registered("me.1", REPLY))) == ["ReportWarm"]


def test_a_master_that_puts_off_is_waited_for() -> None:
    """It is there; the person hears each reason once."""
    agent = Agent(connect_timeout=20.0)
    agent.hear(ev.Started())
    assert agent.hear(ev.Postponed("not yet")) == [ev.Say("not yet")]
    assert agent.hear(ev.Postponed("not yet")) == []
    assert agent.waits(1000.0) == []


def test_an_agent_that_cannot_speak_with_its_master_ends() -> None:
    """One line; its workers do not outlive it."""
    agent = Agent().registered().running()
    assert kinds(agent.hear(ev.Broken("the agent's thread 'outbox' fails"))) == ["StopWorkers", "Exit"]
    (ending,) = agent.did(ev.Exit)
    assert ending.code == ev.EXIT_LEFT_UNSAVED
    assert "outbox" in ending.message


def test_a_node_that_was_in_the_job_waits_for_its_master() -> None:
    """However long it takes to register anew."""
    agent = fenced()
    assert agent.state.door.answer_deadline is None
    assert agent.waits(1000.0) == []
