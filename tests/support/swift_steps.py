"""For ms-swift's ``--external_plugins`` in tests: ``--callbacks steps`` logs steps, at the test's pace.

``STEP_LOG`` in the environment is the directory of the log; DALSEGNO_TEST_HOLDS: see `hooked`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from swift.callbacks import callbacks_map
from swift.callbacks.base import TrainerCallback

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "examples")]

import common  # noqa: E402

from tests.support import hooked  # noqa: E402


class Steps(TrainerCallback):  # type: ignore[misc]  # ms-swift is not typed
    """One line for each step and rank."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log = common.StepLog(
            os.environ.get("STEP_LOG"),
            rank=args.process_index,
            world_size=args.world_size,
            epoch=int(os.environ.get("DALSEGNO_EPOCH", 0)),
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "DALSEGNO_TEST_HOLDS" in os.environ and not hooked.in_a_hurry():
            time.sleep(0.3)
            hooked.wait_for_the_test(args.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        run = getattr(self.trainer, "elastic_run", None)
        if "loss" in logs:
            self._log.write(
                step=state.global_step,
                data_epoch=0 if run is None else run.batch.position.data_epoch,
                sample_ids=() if run is None else run.batch.sample_ids,
                loss=logs["loss"],
                grad_norm=logs["grad_norm"],
            )


callbacks_map["steps"] = Steps
