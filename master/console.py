"""The console script `dlrover-master`. What takes long to import comes behind what a Ctrl-C needs."""

import signal

__all__ = ("main",)


def main() -> int:
    """Runs the master, see `cli.main`. A Ctrl-C ends it by that signal as long as there is nothing to end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as run

    return run()
