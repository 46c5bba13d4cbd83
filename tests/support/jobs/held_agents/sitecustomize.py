"""On an agent's PYTHONPATH: it stops in the middle of what it does, or has little room, until a test lets it go on.

In the agent's environment: DALSEGNO_TEST_HOLDS, the directory where `conversion-<pid>`, `verification-<pid>`,
`placing-<pid>` or `writing-<pid>` appears when it is held; it goes on when `release` appears there. And

    DALSEGNO_TEST_HELD_FILES         its converters stop when so many files are begun
    DALSEGNO_TEST_HELD_VERIFICATION  it stops when it reads a checkpoint's file; its workers, who do so too, do not
    DALSEGNO_TEST_HELD_PLACING       it stops when it puts the resume point into the directory of a script
    DALSEGNO_TEST_HELD_WRITING       it stops when it writes a memory checkpoint to the disk; "fails": it cannot do so
    DALSEGNO_TEST_HELD_AFTER         but not one whose name begins so
    DALSEGNO_TEST_MAKERS             notes there, in `made`, who makes directories of checkpoints on the disk: agent or
                                     worker, and the path
    DALSEGNO_TEST_DEAF               its memory is where nobody answers: as behind a firewall, connections are taken by
                                     the kernel, and nothing is ever said
    DALSEGNO_TEST_FILE_BYTES         no file of it and of what it starts grows beyond so many

An audit hook stays in force in processes that are forked later, and the product knows nothing of it.
"""

import errno
import importlib.abc
import importlib.machinery
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

HOLD_LIMIT = 180.0
Held = Callable[[str, int], bool]


def converting(files: int) -> Held:
    """Only files that are begun, the journal apart."""
    begun: set[str] = set()
    lock = threading.Lock()

    def held(path: str, flags: int) -> bool:
        if not flags & os.O_EXCL or ".universal." not in path or not path.endswith(".pt"):
            return False
        with lock:
            begun.add(path)
            return len(begun) > files

    return held


def verifying(path: str, flags: int) -> bool:
    """The agent itself reads a file of a checkpoint."""
    reads = not flags & (os.O_WRONLY | os.O_RDWR)
    return reads and path.endswith(".pt") and is_agent()


def is_agent() -> bool:
    return sys.argv[0].endswith("dlrover-run")


def writing(path: str, flags: int) -> bool:
    """The agent itself writes a file of a memory checkpoint aside."""
    held = bool(flags & os.O_EXCL) and "/.durable/" in path and is_agent()
    held = held and f"/.durable/{os.environ.get('DALSEGNO_TEST_HELD_AFTER', '/')}" not in path
    if held and os.environ["DALSEGNO_TEST_HELD_WRITING"] == "fails":
        raise OSError(errno.ENOSPC, "no space left, says the test", path)
    return held


class Deaf(importlib.abc.MetaPathFinder):
    """Has the agent's peer server tell another address than its own, once that is imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name != "dalsegno.agent.memory.service":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: object) -> None:
            run(module)  # type: ignore[arg-type]
            listener = socket.create_server(("127.0.0.1", 0))
            plain = module.PeerServer.__init__  # type: ignore[attr-defined]

            def init(self: object, *arguments: object, **named: object) -> None:
                plain(self, *arguments, **named)
                self.address = f"127.0.0.1:{listener.getsockname()[1]}"  # type: ignore[attr-defined]

            module.PeerServer.__init__ = init  # type: ignore[attr-defined]

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def placing(path: str, flags: int) -> bool:
    """The agent itself copies a checkpoint to where a script without a session looks for it."""
    return bool(flags & os.O_EXCL) and path.endswith("/ckpt.pt") and "/step-" not in path and is_agent()


def note_makers(holds: Path) -> None:
    def note(event: str, arguments: tuple[object, ...]) -> None:
        path = str(arguments[0]) if event == "os.mkdir" else ""
        if Path(path).name.startswith("step-") and not path.startswith("/dev/shm/"):
            with open(holds / "made", "a", encoding="utf-8") as file:
                file.write(f"{'agent' if is_agent() else 'worker'} {path}\n")

    sys.addaudithook(note)


def install(what: str, held: Held, holds: Path) -> None:
    def hold(event: str, arguments: tuple[object, ...]) -> None:
        # path, mode, flags
        if event != "open" or not held(str(arguments[0]), int(str(arguments[2]))):
            return
        (holds / f"{what}-{os.getpid()}").touch()
        deadline = time.monotonic() + HOLD_LIMIT
        while not (holds / "release").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a {what} was held for {HOLD_LIMIT:.0f} s")
            time.sleep(0.02)

    sys.addaudithook(hold)


if "DALSEGNO_TEST_HELD_FILES" in os.environ:
    install(
        "conversion",
        converting(int(os.environ["DALSEGNO_TEST_HELD_FILES"])),
        Path(os.environ["DALSEGNO_TEST_HOLDS"]),
    )
if "DALSEGNO_TEST_HELD_VERIFICATION" in os.environ:
    install("verification", verifying, Path(os.environ["DALSEGNO_TEST_HOLDS"]))
if "DALSEGNO_TEST_HELD_WRITING" in os.environ:
    install("writing", writing, Path(os.environ["DALSEGNO_TEST_HOLDS"]))
if "DALSEGNO_TEST_HELD_PLACING" in os.environ:
    install("placing", placing, Path(os.environ["DALSEGNO_TEST_HOLDS"]))
if "DALSEGNO_TEST_DEAF" in os.environ:
    sys.meta_path.insert(0, Deaf())
if "DALSEGNO_TEST_MAKERS" in os.environ:
    note_makers(Path(os.environ["DALSEGNO_TEST_HOLDS"]))
if "DALSEGNO_TEST_FILE_BYTES" in os.environ and not (Path(os.environ["DALSEGNO_TEST_HOLDS"]) / "release").exists():
    size, hard = int(os.environ["DALSEGNO_TEST_FILE_BYTES"]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
