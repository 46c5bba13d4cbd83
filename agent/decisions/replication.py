"""Which of its own parts a node sends to its buddies, and which steps it keeps for that. Pure.

The master chooses, so that all nodes send parts of the same step, and says so in its answers to what is held here.
"""

from __future__ import annotations

from dataclasses import replace

from . import events as ev
from .decision import Decision
from .last_copy import is_own
from .state import AgentState, SentSteps

__all__ = ["answered", "asked", "is_overtaken", "kept", "send", "unanswered", "unheard"]

# So many unanswered calls are remembered.
MOST_ASKED = 16
# And so many steps that earlier masters had sent, and that this one has.
MOST_EARLIER, MOST_PAST = 4, 8


def asked(decision: Decision, digest: str) -> None:
    """The master was told what is held of a step, and will answer."""
    epoch = decision.state.epoch
    if digest not in epoch.sent_steps.asked:
        epoch.sent_steps = replace(epoch.sent_steps, asked=(*epoch.sent_steps.asked, digest)[-MOST_ASKED:])


def answered(decision: Decision, event: ev.Replication) -> None:
    """The master's answer: what this node sends now, and what it keeps."""
    state, said, steps = decision.state, event.said, decision.state.epoch.sent_steps
    named = "" if said is None else said.sending or said.sent
    waiting = steps.asked
    if event.answers in waiting:  # Answers come in order: what was told before and has none will get none.
        waiting = waiting[waiting.index(event.answers) + 1 :]
    state.epoch.sent_steps = replace(steps, asked=waiting)
    if said is None:
        send(decision, event.answers)
    elif said.epoch == state.started and not is_overtaken(steps, event.generation, named):
        replicated = newer(state, steps.replicated, said.replicated)
        earlier, past = steps.earlier, steps.past
        if event.generation != steps.generation:
            earlier, past = (*earlier, steps.sending)[-MOST_EARLIER:], ()
        elif steps.newest and steps.newest != named:
            past = (*past, steps.newest)[-MOST_PAST:]
        earlier = tuple(digest for digest in earlier if step_of(state, digest) > step_of(state, replicated))
        state.epoch.sent_steps = SentSteps(
            said.sending, said.sent, replicated, waiting, event.generation, earlier, past
        )
        if event.answers == said.sending or said.sending != steps.sending:
            send(decision, said.sending)


def is_overtaken(steps: SentSteps, generation: int, named: str) -> bool:
    """Whether the master has said something else since: it goes from none to one step, then to newer ones only."""
    if generation != steps.generation:
        return generation < steps.generation
    return named in steps.past or (not named and bool(steps.newest))


def unanswered(decision: Decision) -> None:
    """What the master was told of gets no answer: it refused to hear it, or the agent that told it was another one."""
    state = decision.state
    state.epoch.sent_steps = replace(state.epoch.sent_steps, asked=())


def unheard(decision: Decision) -> None:
    """Nobody chooses while the master is away: the newest own part is sent."""
    own = [held for digest, held in decision.state.memory.held.items() if is_own(decision.state, digest)]
    if own and not decision.state.contact.up:
        send(decision, max(own, key=lambda held: held.checkpoint.step).checkpoint.ref.digest)


def send(decision: Decision, digest: str) -> None:
    """Sends this node's own part of a step, if it is here."""
    if is_own(decision.state, digest):
        decision.do(ev.SendPart(decision.state.memory.held[digest].checkpoint.ref.name, digest))


def newer(state: AgentState, known: str, said: str) -> str:
    """Which of two steps in memory is kept. A new master hears of them one by one, and may name an older one first."""
    return known if step_of(state, known) > step_of(state, said) else said


def step_of(state: AgentState, digest: str) -> int:
    """The number of a step of which a part is here; -1: none is."""
    held = state.memory.held.get(digest)
    return -1 if held is None else held.checkpoint.step


def kept(state: AgentState) -> set[str]:
    """Digests of the steps that are kept so that one is whole if a node is lost, as far as none on the disk is as new.

    Until the master has answered it may choose what it was told of.
    """
    steps = state.epoch.sent_steps
    named = {steps.sending, steps.sent, steps.replicated, *steps.earlier, *steps.asked[:1]}
    held = {digest: state.memory.held[digest].checkpoint for digest in named if digest in state.memory.held}
    durable = state.epoch.durable_step
    return {digest for digest, step in held.items() if step.epoch == state.started and step.step > durable}
