"""Universal checkpoints: the form of a DeepSpeed ZeRO checkpoint that loads at any world size.

``convert`` makes the universal form of a run's checkpoint, ``convert_directory`` that of any DeepSpeed checkpoint. Both
work in the calling process; ``python -m dalsegno.elastic.universal`` does the same in a process of its own, as agents
do. Importing this package imports neither torch nor DeepSpeed; converting does.

A failure's type says what it means: ``SourceBad`` (the checkpoint is damaged), ``EnvironmentFailed`` (the source
verifies, but this machine could not do it) or ``Impossible`` (no machine can). A target that is not sealed holds only
finished files, which the next lease may take over.
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
from .readers import is_read
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
    "is_read",
    "is_written",
)
