"""How much one message may carry: what its sender keeps to and its receiver holds it to."""

__all__ = ("MESSAGE_BYTES", "MOST_CHECKPOINTS", "MOST_FINISHED_RUNS", "MOST_UNUSABLE")

# Checkpoints in one inventory: the newest.
MOST_CHECKPOINTS = 256
# Checkpoints in sight but unusable in one `JoinRequest`.
MOST_UNUSABLE = 16
# Finished runs in one `RegisterRequest`.
MOST_FINISHED_RUNS = 256
# Of one request to the master. An inventory of that many entries has less than half of it.
MESSAGE_BYTES = 1 << 20
