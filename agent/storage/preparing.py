"""Makes a job's directories as an agent begins, on a file system that may fail, or not answer, for the moment."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from dalsegno.protos.failing import is_away

from ..decisions.decision import SILENCE_SECONDS
from ..decisions.patience import NOT_ANSWERING
from .job_directory import JobDirectory, StorageError
from .survey import FAILING_PAUSES_SECONDS

__all__ = ["prepare"]


def prepare(directory: JobDirectory, say: Callable[[str, bool], None]) -> None:
    """`JobDirectory.prepare`, tried again for about twenty seconds where the file system fails; else supervisors
    would take one stale handle for the end of the job.

    Args:
        directory: the job's.
        say: prints one line for people. It is called on a thread where the file system does not answer.

    Raises:
        StorageError: as that one, of the last try.
    """
    for pause in (*FAILING_PAUSES_SECONDS, None):
        late = threading.Timer(SILENCE_SECONDS, say, (NOT_ANSWERING, True))
        late.daemon = True
        with contextlib.suppress(RuntimeError):  # without room for a thread nobody hears that it takes long
            late.start()
        try:
            directory.prepare()
            return
        except StorageError as error:
            if pause is None or not is_away(error):
                raise
            say(f"it does not register yet, and looks again for some seconds: {error.__cause__}", True)
        finally:
            late.cancel()
        time.sleep(pause)  # why: nothing tells that a file system works again
