"""Ranks of which one ends; run by ``test_lost_peer``. One JSON object in ``argv[1]``.

Attributes of it: ``who`` ends in step ``step``, killed or, where ``own``, by an error of its own. Who ends by an error
writes ``rank-<r>.json`` into ``out`` first: the error's type, whether it may be a peer's, and whether a peer was lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from dalsegno.elastic import session
from dalsegno.elastic.rank.meetings import may_be_a_peers


def main() -> None:
    told = json.loads(sys.argv[1])
    s = session()
    step = 0
    try:
        while True:
            step += 1
            if s.rank == told["who"] and step == told["step"]:
                if not told["own"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("shapes cannot be multiplied")
            s.sum(1.0)
    except Exception as error:
        found = [type(error).__name__, may_be_a_peers(error), s._collective.has_lost_a_peer()]
        (Path(told["out"]) / f"rank-{s.rank}.json").write_text(json.dumps(found))
        raise


if __name__ == "__main__":
    main()
