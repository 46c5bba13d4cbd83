"""For ms-swift's ``--external_plugins`` in tests: ``--callbacks slow`` gives each step some time of its own."""

from __future__ import annotations

import time
from typing import Any

from swift.callbacks import callbacks_map
from transformers import TrainerCallback


class Slow(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """ms-swift makes its callbacks itself."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.2)  # why: it stands for the work of a step


callbacks_map["slow"] = Slow
