"""Leases of a real Commander over real HTTP: at most one for each run, whatever the workers and the Commander do."""

from __future__ import annotations

import signal
import threading
import time
from http.client import HTTPException
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")
pytest.importorskip("yaml", reason="needs the extra relay")

from tests.support.jobs.commander import ADMIN_TOKEN, LEASE_SECONDS, Worker, commander, run_file

pytestmark = pytest.mark.timeout(120)


def pause(seconds: float) -> None:
    time.sleep(seconds)  # why: time that passes is what is tested


def test_of_two_that_race_one_has_the_lease(tmp_path: Path) -> None:
    """Each of many rounds: one is granted, the others are told who holds the run; the end of the work frees it."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        for number in range(5):
            workers = [Worker(one, f"w{number}-{rival}") for rival in range(4)]
            answers: dict[str, tuple[int, dict[str, object]]] = {}
            start = threading.Barrier(len(workers))

            def race(worker: Worker, start: threading.Barrier = start, answers: dict = answers) -> None:  # type: ignore[type-arg]
                start.wait(10)
                answers[worker.name] = worker.acquire()

            threads = [threading.Thread(target=race, args=(worker,)) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            granted = [worker for worker in workers if worker.token]
            assert len(granted) == 1
            (holder,) = granted
            for worker in workers:
                code, said = answers[worker.name]
                if worker is not holder:
                    assert (code, said["status"], said["by"]) == (409, "held", holder.name)
                    assert 0 < float(str(said["expires_in_sec"])) <= LEASE_SECONDS
            assert (one.run()["holder"], one.run()["epoch"]) == (holder.name, number + 1)
            assert holder.report("PREEMPTED", step=number)[0] == 200
            assert (one.run()["state"], one.run()["holder"]) == ("PREEMPTED", None)


def test_what_a_worker_is_told_with_the_lease(tmp_path: Path) -> None:
    """How to work, and what was published last; what it reports is shown, and a milestone outlives the Commander."""
    hub = {"repo": "me/model", "interval_seconds": 60, "on_improve": {"metric": "loss"}}
    with commander(tmp_path / "c.db", [run_file(tmp_path, interval_seconds=30, keep_last=2, hf=hub)]) as one:
        worker = Worker(one, "w1")
        code, said = worker.acquire()
        improve = {"metric": "loss", "mode": "min", "min_delta": 0.0, "metrics_file": "metrics.jsonl"}
        assert (code, said["status"], said["lease_expires_in_sec"]) == (200, "granted", LEASE_SECONDS)
        assert said["config"] == {
            "l1_root": str(tmp_path / "volume"),
            "run_id": "my-run",
            "ckpt_interval_sec": 30.0,
            "ckpt_keep_last_n": 2,
            "hf_sync_interval_sec": 60.0,
            "hf_repo": "me/model",
            "hf_push_on_improve": improve,
        }
        assert (said["last_hf_repo"], said["last_hf_revision"]) == (None, None)
        made = {"last_synced": 1.5, "repo": "me/model", "revision": "abc"}
        assert worker.report(step=7, latest_ckpt="step_7", hf=made, msg="fine")[0] == 200
        assert worker.renew()[1] == {"status": "renewed", "lease_expires_in_sec": LEASE_SECONDS, "order": "continue"}
        shown = one.run()
        assert (shown["state"], shown["step"], shown["report"]["latest_ckpt"]) == ("RUNNING", 7, "step_7")
        one.again()
        assert worker.report("COMPLETED", step=9) == (200, {"status": "released", "state": "COMPLETED"})
        assert worker.report("COMPLETED", step=9)[0] == 200
        shown = one.run()
        assert (shown["state"], shown["holder"]) == ("COMPLETED", None)
        assert [(made["revision"], made["step"]) for made in shown["milestones"]] == [("abc", 7)]
        code, said = Worker(one, "w2").acquire()
        assert (code, said["status"]) == (409, "completed")


def test_a_silent_holder_loses_the_lease(tmp_path: Path) -> None:
    """Not before its time is over, and then to whoever asks; the old token is fenced for good."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        first, second = Worker(one, "w1"), Worker(one, "w2")
        assert first.acquire()[0] == 200
        for _ in range(4):
            pause(LEASE_SECONDS / 4)
            assert first.renew()[0] == 200
            assert second.acquire()[0] == 409
        silent = time.monotonic()
        while second.acquire()[0] == 409:
            assert time.monotonic() < silent + LEASE_SECONDS + 5.0
            pause(0.1)
        assert time.monotonic() - silent >= LEASE_SECONDS - 0.5
        for code, said in (first.renew(), first.report(step=5), first.report("COMPLETED")):
            assert (code, said["status"]) == (409, "fenced")
        assert (second.renew()[0], one.run()["holder"], one.run()["state"]) == (200, "w2", "RUNNING")


@pytest.mark.full
def test_a_lease_whose_holder_is_known_dead_is_ended(tmp_path: Path) -> None:
    """By the admin alone, and not while the holder is heard; the next one is let in at once, the old one no more."""
    with commander(tmp_path / "c.db", [run_file(tmp_path, lease_seconds=60)]) as one:
        first, second = (Worker(one, name) for name in ("w1", "w2"))
        path = "/api/relay/my-run/expire"
        assert one.ask("POST", path, token=ADMIN_TOKEN)[0] == 409, "nobody holds it"
        first.acquire()
        assert one.ask("POST", path)[0] == 403
        code, said = one.ask("POST", path, token=ADMIN_TOKEN)
        assert (code, said["by"], "w1 lives: it was heard" in said["detail"]) == (409, "w1", True)
        assert second.acquire()[0] == 409
        deadline = time.monotonic() + 30.0
        while (code := one.ask("POST", path, token=ADMIN_TOKEN)[0]) == 409 and time.monotonic() < deadline:
            time.sleep(0.2)  # why: silence is what it waits for
        assert code == 200
        assert one.run()["state"] == "PREEMPTED"
        assert second.acquire()[0] == 200, "long before the lease would have been over"
        assert first.renew()[1]["status"] == "fenced"
        said = one.ask("GET", "/api/relay/my-run/events")[1]
        assert any("gone, says the admin" in event["text"] for event in said["events"])


@pytest.mark.full
def test_a_late_holder_keeps_what_nobody_wants(tmp_path: Path) -> None:
    """The end of a lease by itself takes nothing from anybody."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        worker = Worker(one, "w1")
        worker.acquire()
        pause(LEASE_SECONDS + 1.0)
        assert one.run()["expires_in_sec"] == 0.0
        assert worker.renew()[0] == 200
        assert Worker(one, "w2").acquire()[0] == 409


@pytest.mark.full
def test_a_lease_outlives_the_commander(tmp_path: Path) -> None:
    """Killed and started again: the same token renews, and nobody else gets the lease meanwhile."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        first, second = Worker(one, "w1"), Worker(one, "w2")
        first.acquire()
        pause(LEASE_SECONDS / 2)
        port = one.runs["my-run"]["address"]
        for _ in range(2):
            one.again()
            assert one.runs["my-run"]["address"] == port
            assert second.acquire()[1]["by"] == "w1"
            pause(LEASE_SECONDS / 2)
            assert second.acquire()[0] == 409
            assert first.renew()[0] == 200
        assert (one.run()["epoch"], one.run()["state"]) == (1, "RUNNING")
        one.end(signal.SIGKILL)
        pause(LEASE_SECONDS)
        one.start()
        # It was away for longer than the lease, and nobody was heard: the time begins anew.
        assert second.acquire()[0] == 409
        pause(LEASE_SECONDS + 0.5)
        assert second.acquire()[0] == 200
        assert first.renew()[1]["status"] == "fenced"


@pytest.mark.full
def test_time_in_which_the_commander_stood_still_takes_no_lease(tmp_path: Path) -> None:
    """Stopped for longer than the lease: the holder has what it had left, although others ask first."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        first, second = Worker(one, "w1"), Worker(one, "w2")
        first.acquire()
        one.process.send_signal(signal.SIGSTOP)
        answers: list[int] = []
        rival = threading.Thread(target=lambda: answers.append(second.acquire()[0]))
        rival.start()
        pause(LEASE_SECONDS + 2.0)
        one.process.send_signal(signal.SIGCONT)
        rival.join(20)
        assert answers == [409]
        assert first.renew()[0] == 200


def test_only_the_admin_overrules_a_holder(tmp_path: Path) -> None:
    """By force the lease goes on at once, and a release leaves the run to whoever comes."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        first, second, third = (Worker(one, name) for name in ("w1", "w2", "w3"))
        first.acquire()
        code, said = second.acquire(force=True)
        assert (code, "only the admin's token" in said["detail"]) == (403, True)
        assert first.renew()[0] == 200
        assert second.acquire(force=True, token=ADMIN_TOKEN)[0] == 200
        assert first.renew()[1]["status"] == "fenced"
        path = "/api/relay/my-run/release"
        assert one.ask("POST", path)[0] == 403
        assert one.ask("POST", path, token=ADMIN_TOKEN) == (200, {"status": "released", "holder": "w2"})
        assert one.ask("POST", path, token=ADMIN_TOKEN)[0] == 409
        assert (second.renew()[1]["status"], one.run()["state"]) == ("fenced", "PREEMPTED")
        assert third.acquire()[0] == 200
        assert one.run()["epoch"] == 3


@pytest.mark.full
def test_a_run_that_failed_goes_on_with_the_next_worker(tmp_path: Path) -> None:
    """The report frees it at once, says why, and stays over a restart."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        first, second = Worker(one, "w1"), Worker(one, "w2")
        first.acquire()
        code, said = first.report("FAILED", step=3, msg="out of memory")
        assert (code, said) == (200, {"status": "released", "state": "FAILED"})
        one.again()
        shown = one.run()
        assert (shown["state"], shown["holder"], "w1 has failed: out of memory" in shown["detail"]) == (
            "FAILED",
            None,
            True,
        )
        assert second.acquire()[0] == 200
        assert one.run()["state"] == "RUNNING"
        # The next one need not wait until the one that failed is forgotten.
        assert second.report("FAILED")[0] == 200
        assert second.acquire()[0] == 200


@pytest.mark.full
def test_a_run_that_was_stopped_lets_nobody_in(tmp_path: Path) -> None:
    """Until somebody starts it; who asked in vain leaves nothing behind."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        worker, path = Worker(one, "w1"), "/api/relay/my-run"
        assert one.ask("POST", f"{path}/stop")[0] == 200
        code, said = worker.acquire()
        assert (code, said["status"], "was stopped by order" in said["detail"]) == (409, "released", True)
        assert one.ask("GET", f"{path}/job")[1]["nodes"] == []
        assert one.ask("POST", f"{path}/start")[0] == 200
        assert worker.acquire()[0] == 200


@pytest.mark.full
def test_a_worker_is_told_to_go(tmp_path: Path) -> None:
    """What a person orders reaches it with its next renewal; then it says that it goes."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        worker = Worker(one, "w1")
        worker.acquire()
        assert one.ask("POST", "/api/relay/my-run/nodes/w1/drain")[0] == 200
        for _ in range(6):
            code, said = worker.renew()
            assert (code, said["order"]) == (200, "leave")
            # It still saves: nobody else may write.
            assert Worker(one, "w2").acquire()[1]["by"] == "w1"
            pause(LEASE_SECONDS / 2)
        assert worker.report("PREEMPTED", step=4)[0] == 200
        assert one.run()["state"] == "PREEMPTED"


@pytest.mark.full
def test_runs_of_one_commander_are_independent(tmp_path: Path) -> None:
    """Each has its own lease, epoch, milestones and end."""
    files = [run_file(tmp_path, f"run-{name}") for name in "ab"]
    with commander(tmp_path / "c.db", files) as one:
        first, second = Worker(one, "w", "run-a"), Worker(one, "w", "run-b")
        assert (first.acquire()[0], second.acquire()[0]) == (200, 200)
        assert one.run("run-a")["grpc_port"] != one.run("run-b")["grpc_port"]
        first.report("COMPLETED", step=3, hf={"repo": "a/b", "revision": "c"})
        assert [one.run(name)["state"] for name in ("run-a", "run-b")] == ["COMPLETED", "RUNNING"]
        assert (one.run("run-b")["milestones"], second.renew()[0]) == ([], 200)
        assert one.ask("GET", "/api/relay")[1] == {"runs": ["run-a", "run-b"]}
        # A token of one run is nothing in the other.
        second.token, second.run_id = first.token, "run-b"
        assert second.report(step=1)[0] == 400
        assert one.end() == 0


@pytest.mark.full
def test_a_commander_that_is_killed_while_it_answers(tmp_path: Path) -> None:
    """At any moment of an acquire, a renewal or a report: at most one token is good, and the run is never stuck."""
    random = Random(7)
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        tokens: list[Worker] = []
        for number in range(12):
            workers = [Worker(one, f"w{number}-{rival}") for rival in range(2)]
            threads = [threading.Thread(target=stubborn, args=(worker,)) for worker in workers]
            for thread in threads:
                thread.start()
            pause(random.uniform(0.0, 0.12))
            one.again()
            for thread in threads:
                thread.join(30)
            tokens += [worker for worker in workers if worker.token]
            good = [worker for worker in tokens if worker.renew()[0] == 200]
            assert len(good) <= 1
            # A token whose answer was lost is good for one lease only.
            next_one = Worker(one, f"next-{number}")
            until = time.monotonic() + LEASE_SECONDS + 10.0
            while not good and next_one.acquire()[0] != 200:
                assert time.monotonic() < until
                pause(0.2)
            holder = good[0] if good else next_one
            assert one.run()["holder"] == holder.name
            if number % 2:
                assert holder.report("PREEMPTED", step=number)[0] == 200
            tokens = [worker for worker in [*tokens, next_one] if worker.token]


def stubborn(worker: Worker) -> None:
    """Takes the lease, keeps it and reports, until the Commander does not answer."""
    try:
        if worker.acquire()[0] == 200:
            for step in range(20):
                worker.renew()
                worker.report(step=step)
    except (OSError, HTTPException, ValueError):
        return
