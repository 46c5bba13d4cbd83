"""How much one message may carry. Senders keep to these limits, and receivers enforce them."""

__all__ = ("MESSAGE_BYTES", "MOST_CHECKPOINTS", "MOST_FINISHED_RUNS", "MOST_UNUSABLE")

# Checkpoints in one inventory: the newest.
MOST_CHECKPOINTS = 256
# Checkpoints in sight but unusable in one `JoinRequest`.
MOST_UNUSABLE = 16
# Finished runs in one `RegisterRequest`.
MOST_FINISHED_RUNS = 256
# Bytes of one request to the master. A full inventory takes less than half of them.
MESSAGE_BYTES = 1 << 20
