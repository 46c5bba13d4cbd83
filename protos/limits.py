"""How much one message may hold. Agents stay within it, and the master refuses or leaves out what is beyond."""

__all__ = ("MESSAGE_BYTES", "MOST_CHECKPOINTS")

# Checkpoints in one inventory: the newest.
MOST_CHECKPOINTS = 256
# Of one request to the master. An inventory of that many entries has less than half of it.
MESSAGE_BYTES = 1 << 20
