"""How much one message may carry. Senders keep to these limits, and receivers enforce them."""

__all__ = (
    "LONGEST_SECONDS",
    "MESSAGE_BYTES",
    "MOST",
    "MOST_CHECKPOINTS",
    "MOST_EARLIER",
    "MOST_FINISHED_RUNS",
    "MOST_SETTING",
    "MOST_UNUSABLE",
)

# Checkpoints in one inventory: the newest.
MOST_CHECKPOINTS = 256
# Checkpoints in sight but unusable in one `JoinRequest`.
MOST_UNUSABLE = 16
# Directories of earlier leases of which one conversion takes over what they have finished: the newest.
MOST_EARLIER = 8
# Finished runs in one `RegisterRequest`.
MOST_FINISHED_RUNS = 256
# The largest step, epoch, lease or count of bytes. A JSON number holds it exactly, 64 bits a thousand times it.
MOST = 1 << 53
# The most that min and max nodes and the unit of a world may be.
MOST_SETTING = 1 << 20
# The longest duration: thirty years.
LONGEST_SECONDS = 1e9
# Bytes of one request to the master. A full inventory takes less than half of them.
MESSAGE_BYTES = 1 << 20
