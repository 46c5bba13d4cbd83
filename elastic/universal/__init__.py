"""Universal checkpoints: the form of a DeepSpeed ZeRO checkpoint that loads at any world size.

``convert`` makes that of a run's checkpoint, ``convert_directory`` that of any. Both work in this process;
``python -m dalsegno.elastic.universal`` is one of its own, which is how an agent does it. Importing this package
imports neither torch nor DeepSpeed; converting does.

What a failure means is in its type: ``SourceBad`` (the checkpoint is damaged), ``EnvironmentFailed`` (this machine
could not do it with a source that verifies) or ``Impossible`` (no machine can). A target that is not sealed holds
nothing but finished files that the next lease may take over.
"""

from .conversion import Watch, Wish, convert
from .effort import Effort
from .errors import (
    EXIT_ENVIRONMENT,
    EXIT_IMPOSSIBLE,
    EXIT_READY,
    EXIT_SOURCE_BAD,
    ConversionError,
    EnvironmentFailed,
    Impossible,
    SourceBad,
)
from .journal import is_written
from .standalone import convert_directory

__all__ = (
    "EXIT_ENVIRONMENT",
    "EXIT_IMPOSSIBLE",
    "EXIT_READY",
    "EXIT_SOURCE_BAD",
    "ConversionError",
    "Effort",
    "EnvironmentFailed",
    "Impossible",
    "SourceBad",
    "Watch",
    "Wish",
    "convert",
    "convert_directory",
    "is_written",
)
