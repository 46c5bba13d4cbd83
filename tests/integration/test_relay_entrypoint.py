"""The entry point of a pod's image, as process 1 of a container: no notice is lost, however early it comes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.hosts.namespaces import children_of
from tests.support.jobs.pods import Pod, Run, relayed

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(280),
    # Only root may make a container like this.
    pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="no namespaces of process numbers here"),
]


def has_begun(pod: Pod) -> bool:
    """Whether process 1 of the container is the entry point, and no longer what makes the container."""
    words = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children_of(pod.process.pid)]
    return any(b"-c" not in one and b"unshare" not in one[0] for one in words)


def begun(run: Run, name: str) -> Pod:
    pod = run.pod(name, contained=True, image=True)
    run.wait(lambda: has_begun(pod), "the container", 20.0)
    time.sleep(0.02)  # why: a shell's first lines
    return pod


def test_a_notice_is_heard_at_any_moment_of_the_start(tmp_path: Path) -> None:
    """Python handles no signal in its first second. The pod ends, and the next one takes nothing up but the run."""
    with relayed(tmp_path, "--end-when-asked", "--save-every=1000", steps=30) as run:
        for number, delay in enumerate((0.0, 0.05, 0.2, 0.4, 0.8, 1.6)):
            pod = begun(run, f"a{number}")
            time.sleep(delay)  # why: the moment is what is tried
            pod.notice()
            # 143: Python had no handler yet, so nothing was begun.
            assert pod.process.wait(30) in (75, 76, 143), run.said()
        last = begun(run, "b")
        assert last.process.wait(120) == 0, run.said()
        run.assert_one_history(30)


def test_the_trainer_saves_at_a_notice(tmp_path: Path) -> None:
    """The exit code is the pod's, and not a step is lost."""
    with relayed(tmp_path, "--end-when-asked", "--save-every=1000", steps=60) as run:
        pod = begun(run, "a")
        run.wait_step(10)
        pod.notice()
        assert pod.process.wait(60) == 75, run.said()
        assert begun(run, "b").process.wait(120) == 0, run.said()
        first, second = run.epochs().values()
        assert second[0].step == first[-1].step + 1
        run.assert_one_history(60)
