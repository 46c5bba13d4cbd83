"""Whether Hugging Face's hub answers: found out beside the first world, so that later ones need not wait for it.

The first world of a run asks the hub as the script would anywhere. What the later ones need of it lies in the cache.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from dalsegno.protos.contract import Variable
from dalsegno.protos.shortage import starting

from ..script import Script, asks_hub
from ..standby.hub_offline import OFFLINE
from ..storage.hub_note import HubNote

__all__ = ["HubKnowledge", "answers"]

HUB = "https://huggingface.co"
# Seconds that it has for an answer: what the library itself gives it.
ANSWER_SECONDS = 10.0
# The same where other nodes have found that it does not answer: who is there does so in less.
ANSWER_SOON_SECONDS = 3.0
# So many times in a row nobody must answer, with such a pause in between. After that it is asked less often.
TIMES, PAUSE_SECONDS, LONG_PAUSE_SECONDS = 2, 3.0, 60.0

logger = logging.getLogger(__name__)


def answers(url: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether anybody answers there, whatever the answer is. Uses the proxies of the environment, as the library does.

    In doubt it does: only a host that cannot be resolved or reached, or is silent for so long, does not.
    """
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # What is wrong with a certificate is said by somebody who is there.
        reason = error.reason
        return not isinstance(reason, OSError) or type(reason).__module__ == "ssl"
    except OSError as error:
        return not isinstance(error, TimeoutError | ConnectionError)
    except Exception:
        logger.exception("the hub %s could not be asked", url)
    return True


class HubKnowledge:
    """One node's knowledge of the hub that its script asks.

    Args:
        script: what the workers run; no hub is asked if its text does not import a library that asks one.
        say: prints one line for people.
        environ: the agent's environment, which the workers get.
        pauses: seconds between two questions until nobody counts as answering, and after that.
        directory: the job's private one, where the nodes tell each other; None: they do not.
    """

    def __init__(
        self,
        script: Script,
        say: Callable[[str, bool], None],
        environ: Mapping[str, str] = os.environ,
        pauses: tuple[float, float] = (PAUSE_SECONDS, LONG_PAUSE_SECONDS),
        directory: Path | None = None,
    ) -> None:
        self._say, self._pauses = say, pauses
        self._url = environ.get("HF_ENDPOINT", HUB).rstrip("/")
        decided = OFFLINE in environ or "TRANSFORMERS_OFFLINE" in environ
        self._wanted = not decided and self._url.startswith("http") and asks_hub(script)
        self._silent = False
        # Until its own answer has come; and of nothing that a person has decided.
        self._takes_others_word = self._wanted
        self._note = None if directory is None else HubNote(directory, self._url)

    def begin(self) -> None:
        """Begins to ask, once. A node that joins a run has the answer before its workers start, as the others have.

        What these have found counts until it has its own.
        """
        if self._wanted:
            self._wanted = False
            self._silent = self._note is not None and self._note.is_fresh()
            try:
                with starting("the thread that asks for the hub"):
                    threading.Thread(target=self._watch, name="hub", daemon=True).start()
            except OSError as error:
                logger.warning("%s", error)

    def variables(self, epoch: int) -> dict[str, str]:
        """What the workers of this epoch are told."""
        self.begin()
        if epoch <= 1:
            return {}
        # A node that came in the run's first seconds has begun to ask before anybody knew.
        others = self._takes_others_word and self._note is not None and self._note.is_fresh()
        return {Variable.HUB_UNREACHABLE: self._url} if self._silent or others else {}

    def _watch(self) -> None:
        """Asks until somebody answers."""
        # What others have found, and this node finds, too, is known.
        failed, told = TIMES - 1 if self._silent else 0, self._silent
        while not answers(self._url, ANSWER_SOON_SECONDS if told else ANSWER_SECONDS):
            failed, told = failed + 1, False
            if failed >= TIMES and self._note is not None:
                self._note.write()
            if failed == TIMES:
                self._silent = True
                self._say(
                    f"{self._url} does not answer: after a change of the world the script takes what is in its cache "
                    f"({OFFLINE}=1) and does not wait for it; to decide yourself, set {OFFLINE} to 0 or 1",
                    False,
                )
            time.sleep(self._pauses[failed >= TIMES])  # why: no event tells that a hub answers
        self._takes_others_word = False
        if told:
            self._silent = False  # for this node it does, and was never said to be silent
        elif self._silent:
            self._silent = False
            if self._note is not None:
                self._note.remove()
            self._say(f"{self._url} answers again: from the next change of the world on the script asks it", False)
