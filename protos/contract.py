"""Exit codes of `dlrover-run` and of its workers (docs/contracts.md). Nothing is imported here: a light way in."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LEFT = 75
EXIT_LEFT_UNSAVED = 76
WORKER_DRAINED = 83
WORKER_BAD_CHECKPOINT = 84
