"""The listening clock: counts only the time in which the master could hear agents.

Silence proves something only while somebody could have been heard. So every deadline that waits for an agent to speak
uses this clock. It stands still

- while the master's own loop stood still (`held_up`);
- while nobody at all is heard, or every stream is closed: then the master, or its network, is the one that is away;
- for a short time after an outage, in which agents come back one by one; not where the only node of the world has
  closed its stream itself, which no outage does, and a newcomer is what is heard.

It never runs backwards and never faster than real time. At least half of the time that was really listened counts, so
that a master which is held up again and again still finds out who is dead.
"""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.protos.contract import HEARTBEAT_SECONDS

__all__ = ("HEARTBEAT_SECONDS", "ListeningClock")

# After so many heartbeats without a word from anybody the master takes itself to be cut off: the first number at most,
# and before a short node-timeout ends, but never within the time between two heartbeats.
DEAF_AFTER = 2.5
DEAF_LEAST = 1.5
# Seconds after which agents give a heartbeat up and open their connections anew.
OUTAGE_SECONDS = 3.0
# Seconds that agents may take to be heard again after an outage.
RECONNECT_SECONDS = 5.0


@dataclass
class ListeningClock:
    """All times are monotonic seconds of the master's process. `at` returns them less the time that was missed."""

    missed: float = 0.0
    # What was shown last, so that it never shows less.
    shown: float = float("-inf")
    last_word: float = 0.0
    # What it showed when it stopped.
    word_shown: float = float("-inf")
    # Whether somebody is registered, so that there is anybody to hear.
    expects: bool = False
    # Since when every stream is closed.
    shut_at: float | None = None
    slack: float = DEAF_AFTER * HEARTBEAT_SECONDS
    # What it showed when agents were last given time to come back.
    paused_at: float = float("-inf")

    def at(self, now: float) -> float:
        """What the clock shows now."""
        self.shown = max(self.shown, self._end(now) - self.missed)
        return self.shown

    def stands_still(self, now: float) -> bool:
        """Whether it stands still until somebody is heard."""
        return self._end(now) < now

    def real(self, now: float, shows: float) -> float:
        """The real time at which it will show `shows` if it runs from now on."""
        return self.missed + shows if shows > self.at(now) else now

    def word(self, now: float, node_timeout: float, beat: float = HEARTBEAT_SECONDS, *, left: bool = False) -> bool:
        """Somebody is heard; agents speak every `beat` seconds. Returns whether the clock stood still until now.

        `left`: all that were here before have closed their streams themselves.
        """
        stood = now - self._end(now)
        left = left and self.shut_at is not None
        shown = self.at(now)
        self.last_word, self.shut_at, self.expects = now, None, True
        self.slack = min(DEAF_AFTER * beat, max(DEAF_LEAST * beat, node_timeout / 2))
        if stood > 0.0:
            self.missed = now - shown
            if not left:
                self._after_outage(stood, node_timeout)
        self.word_shown = self.at(now)
        return stood > 0.0

    def held_up(self, seconds: float, node_timeout: float) -> None:
        """The master's loop stood still for `seconds` until now."""
        self.missed += seconds
        self.last_word += seconds
        if self.shut_at is not None:
            self.shut_at += seconds
        self._after_outage(seconds, node_timeout)

    def shut(self, now: float) -> None:
        """No stream is open any more."""
        if self.shut_at is None:
            self.shut_at = now

    def reopened(self, now: float) -> None:
        """A stream is open although nobody spoke: all who had no stream are gone from the record."""
        self._rebase(now, None, self.expects)

    def nobody(self, now: float) -> None:
        """Nobody is registered, so nobody can be missed, and time goes on."""
        self._rebase(now, None, False)

    def _rebase(self, now: float, shut_at: float | None, expects: bool) -> None:
        shown = self.at(now)
        self.shut_at, self.expects = shut_at, expects
        self.missed = max(self.missed, self._end(now) - shown)

    def _end(self, now: float) -> float:
        """Until when it has run, if it stands still."""
        end = min(now, self.last_word + self.slack) if self.expects else now
        return end if self.shut_at is None else min(end, self.shut_at)

    def _after_outage(self, gap: float, node_timeout: float) -> None:
        """Stands still for as long again while agents come back; that is at most half of what was listened."""
        pause = min(gap, RECONNECT_SECONDS, node_timeout)
        if gap >= OUTAGE_SECONDS and self.shown - self.paused_at >= pause:
            self.paused_at = self.shown
            self.missed += pause
