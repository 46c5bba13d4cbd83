"""Universal checkpoints: the form of a DeepSpeed ZeRO checkpoint that loads at any world size.

``convert`` does it in this process, ``python -m dalsegno.elastic.universal`` in one of its own, which is how an agent
does it. Importing this package imports neither torch nor DeepSpeed; converting does.

What a failure means is in its type: ``SourceBad`` (the checkpoint is damaged) or ``EnvironmentFailed`` (this machine
could not do it with a source that verifies). A target that is not sealed holds nothing but finished files that the
next lease may take over.
"""

from .conversion import convert
from .errors import EXIT_ENVIRONMENT, EXIT_READY, EXIT_SOURCE_BAD, ConversionError, EnvironmentFailed, SourceBad

__all__ = (
    "EXIT_ENVIRONMENT",
    "EXIT_READY",
    "EXIT_SOURCE_BAD",
    "ConversionError",
    "EnvironmentFailed",
    "SourceBad",
    "convert",
)
