"""For ms-swift's ``--external_plugins`` in tests: ``--callbacks steps`` logs steps, at the test's pace.

``STEP_LOG`` in the environment is the directory of the log; DALSEGNO_TEST_HOLDS and DALSEGNO_TEST_STANDS (`behind` or
`before`): see `hooked`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from swift.callbacks import callbacks_map

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT), str(ROOT / "examples")]

import hf_trainer  # noqa: E402

from tests.support.jobs import hooked  # noqa: E402


class Steps(hf_trainer.StepLog):  # type: ignore[misc]  # transformers is not typed
    """The example's log of steps, for ms-swift, which makes its callbacks itself."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(os.environ.get("STEP_LOG"))
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wait("before", args.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "DALSEGNO_TEST_HOLDS" in os.environ and not hooked.in_a_hurry():
            time.sleep(0.3)
            self._wait("behind", args.max_steps)

    def _wait(self, place: str, steps: int) -> None:
        if os.environ.get("DALSEGNO_TEST_STANDS", "behind") == place and not hooked.in_a_hurry():
            hooked.wait_for_the_test(steps)


callbacks_map["steps"] = Steps
