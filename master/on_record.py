"""`python -m dalsegno.master.on_record FILE JOB`: what happened to a job that has no master just now, by its record.

Writes one line of JSON to stdout, whose `events` are an `EventsReply` in base64. The record stays as it is: the next
master goes on with it.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import EXIT_FAILED, EXIT_FINISHED

from .brain.chronicle import in_order
from .brain.shown import event_proto
from .record.codec import JobCodec
from .record.store import SqliteStore, StoreError


def main(arguments: Sequence[str]) -> int:
    """Returns 0; 1, with one line, if the record cannot be read."""
    path, job_id = Path(arguments[0]), arguments[1]
    try:
        if not path.exists():  # it would be made
            raise StoreError(f"there is no store {path}")
        store = SqliteStore(path, job_id)
        try:
            job = JobCodec().decode(store.load())
        finally:
            store.close()
    except (StoreError, OSError) as error:
        print(f"dlrover-master: {error}", file=sys.stderr)
        return EXIT_FAILED
    events = in_order(job.events, job.remarks)
    reply = pb.EventsReply(generation=job.generation)
    if events:
        reply.oldest, reply.newest = events[0].sequence, events[-1].sequence
    reply.events.extend(map(event_proto, events))
    print(json.dumps({"events": base64.b64encode(reply.SerializeToString()).decode("ascii")}), flush=True)
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
