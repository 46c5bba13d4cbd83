"""How a conversion can fail, and what each failure means for the run (docs/architecture.md, conversion gate)."""

from __future__ import annotations

EXIT_READY = 0
"""The target is sealed."""
EXIT_SOURCE_BAD = 65
"""The source is damaged or incomplete: the checkpoint must be retired. (``EX_DATAERR`` of ``sysexits.h``)"""
EXIT_ENVIRONMENT = 74
"""This machine could not do it with a source that verifies. (``EX_IOERR`` of ``sysexits.h``)"""
EXIT_IMPOSSIBLE = 69
"""The source verifies, and has no universal form. (``EX_UNAVAILABLE`` of ``sysexits.h``)"""


class ConversionError(Exception):
    """A conversion that did not end with a sealed target. Use one of the kinds below."""

    exit_code = EXIT_ENVIRONMENT
    state = "ENVIRONMENT"


class SourceBad(ConversionError):
    """A checksum or the completeness check proves the source damaged; no machine can convert it.

    A run retires it. So for a run's checkpoint only `conversion.verified` raises this: see `conversion.convert`.
    """

    exit_code = EXIT_SOURCE_BAD
    state = "SOURCE_BAD"


class Disagrees(SourceBad):
    """Its files are there and are whole, and what they say does not fit together: whoever reads them finds the same."""


class EnvironmentFailed(ConversionError):
    """Disk, memory, or a converter error on a source that verifies. Another try, or another machine, may do it."""


class Impossible(EnvironmentFailed):
    """What was saved has no universal form: no machine can make one, now or later."""

    exit_code = EXIT_IMPOSSIBLE
    state = "IMPOSSIBLE"
