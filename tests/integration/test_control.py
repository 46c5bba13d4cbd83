"""Orders to a real job, by the commands and over HTTP: a node drained, a save, a stop and what comes after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.cluster import HF, LEFT, TRAIN, Cluster, Training, Undisturbed
from tests.support.jobs.master_process import Agent, MasterProcess, master_process, settings

pytestmark = [pytest.mark.timeout(300), pytest.mark.executed]

Clusters = Callable[..., Cluster]
STOPPED = 1


def dalsegno(job: Cluster, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command answers, as JSON."""
    asked = [*arguments, "--json", f"--job-id={job.job}", f"--checkpoint-dir={job.checkpoints}"]
    done = subprocess.run(
        [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", *asked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, f"{arguments}: {done.stdout} {done.stderr}"
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"error": done.stderr}


def ask(master: MasterProcess, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """What the master's HTTP port answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{master.http}/api/v1/{path}", data, method=method)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for what a master says while no agent is there."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def judge(job: Cluster, undisturbed: Undisturbed) -> None:
    """Nothing that was ordered has cost a step."""
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


OF_ZERO = Training(script=TRAIN, steps=120, save_every=0, extra=("--zero-stage=1",))
OF_HF = Training(HF, 120, 1000, needs_agent=True, preloaded="tests.support.forks.preloaded_hf")


@pytest.mark.full
@pytest.mark.parametrize(
    ("training", "universal"),
    [(Training(steps=120, save_every=0), ""), (OF_ZERO, ""), (OF_ZERO, "gate"), (OF_HF, "")],
    ids=["ddp", "zero, re-sharded", "zero, universal first", "Hugging Face"],
)
def test_a_job_is_drained_saved_and_stopped_by_commands(
    clusters: Clusters, undisturbed: Undisturbed, training: Training, universal: str
) -> None:
    """With the master that the first agent hosts; the same command goes on behind the stop, from the same step."""
    job = clusters(universal=universal, training=training)
    job.open("a", "b")
    made = dalsegno(job, "checkpoint")
    assert made["done"]
    assert made["became"].endswith("is committed")
    assert made["became"].split()[0] in [one.name for one in job.sealed()]
    epoch = job.epoch()
    leaver = job.node("b")
    leaver.expected = LEFT
    assert dalsegno(job, "drain", "b")["done"]
    job.wait_exit(leaver)
    assert leaver.said()[-1] == "left by order; everything is saved"
    second = job.wait_world(1, steps=3, after=epoch)
    assert job.change(second).cause == "b left"
    first = job.node("a")
    first.expected = STOPPED
    stopped = dalsegno(job, "stop")
    assert stopped["done"]
    assert "the same command goes on with it" in stopped["text"]
    job.wait_exit()
    assert first.said()[-1] == "the job was stopped by order; everything is saved"
    assert not any("the job failed" in line for line in first.said())
    job.open("a")
    assert job.first_step(job.epoch()) == max(line.step for line in job.lines if line.epoch == second) + 1
    again = job.node("a")
    job.finish(again)
    judge(job, undisturbed)


def test_a_service_is_controlled_over_http(
    clusters: Clusters, undisturbed: Undisturbed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same orders; events outlive the master; nobody comes in uninvited."""
    pytest.importorskip("fastapi", reason="needs the extra http")
    place = tmp_path_factory.mktemp("master")
    training = Training(steps=120, save_every=0)
    with master_process(place / "s.sqlite", "--http-port", "0", job_id="service") as master:
        flags = (f"--master={master.address}",)
        job = clusters(universal="", training=training, agent_flags=flags, job="service")
        job.open("a", "b")
        code, reply = ask(master, "POST", "checkpoint")
        assert (code, "behind step" in reply["text"]) == (200, True)
        job.wait_for(lambda: [one for one in job.sealed() if one.step > reply["step"]], "the save by order")
        first = job.epoch()
        leaver = job.node("b")
        leaver.expected = LEFT
        assert ask(master, "POST", "nodes/b/drain")[0] == 200
        job.wait_exit(leaver)
        job.wait_world(1, steps=3, after=first)
        job.wait_for(lambda: ask(master, "POST", "nodes/b/drain")[0] == 404 or None, "b to be gone")
        port = ("--port", master.address.rpartition(":")[2])
        master.kill()
    with master_process(place / "s.sqlite", "--http-port", "0", *port, job_id="service") as master:
        events = ask(master, "GET", "events")[1]["events"]
        kinds = [event["kind"] for event in events]
        for kind in ("registered", "formed", "stepped", "ordered", "committed", "draining", "left"):
            assert kind in kinds, kinds
        change = [event for event in events if event["kind"] == "stepped"][-1]
        assert sum(part["seconds"] for part in change["parts"]) == pytest.approx(change["seconds"], abs=0.01)
        assert {"saved", "formed", "first step"} <= {part["name"] for part in change["parts"]}
        status = ask(master, "GET", "job")[1]
        assert 0 < status["goodput"] <= 1
        known = int(status["step"])
        job.wait_for(lambda: int(ask(master, "GET", "job")[1]["step"]) > known or None, "a step under the new master")
        job.node("a").expected = STOPPED
        assert ask(master, "POST", "stop")[0] == 200
        job.wait_exit()
        until(lambda: ask(master, "GET", "job")[1]["phase"] == "PHASE_STOPPED")
        (late,) = job.start("c")
        late.expected = STOPPED
        job.wait_exit(late)
        assert "dalsegno start lets agents go on with it" in late.said()[-1]
        until(lambda: ask(master, "POST", "start")[0] == 200)
        job.open("d")
        job.finish(job.node("d"))
    judge(job, undisturbed)


@pytest.mark.full
def test_a_stop_leaves_nothing_in_memory_alone(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Drains go to memory where somebody stays; here nobody does."""
    job = clusters(
        universal="",
        agent_flags=("--memory-replicas=1",),
        training=Training(steps=120, save_every=0, extra=("--memory-every=2",)),
    )
    job.open("a", "b")
    made = dalsegno(job, "checkpoint")
    assert made["done"]
    assert made["became"].split()[0] in [one.name for one in job.sealed()]
    for node in job.nodes:
        node.expected = STOPPED
    assert dalsegno(job, "stop")["done"]
    job.wait_exit()
    last = max(line.step for line in job.poll())
    assert max(one.step for one in job.sealed()) == last
    job.open("a", "b")
    job.finish(*job.nodes[-2:])
    judge(job, undisturbed)


def test_what_a_node_says_of_itself_is_an_event(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its console shows it, and no other; the job's events have it, for the page and for tools."""
    pytest.importorskip("fastapi", reason="needs the extra http")
    place = tmp_path_factory.mktemp("master")
    with master_process(place / "s.sqlite", "--http-port", "0", job_id="service") as master:
        flags = (f"--master={master.address}",)
        job = clusters(training=Training(steps=400, save_every=0), agent_flags=flags, job="service")
        job.open("a")
        leaver = job.node("a")
        leaver.expected = LEFT
        leaver.process.send_signal(signal.SIGTERM)
        job.wait_exit(leaver)
        text = "SIGTERM: saving at the next step boundary, then leaving"
        assert any(line.endswith(text) for line in leaver.said())
        own = [event for event in ask(master, "GET", "events")[1]["events"] if event["text"].endswith(text)]
        assert [(event["text"], event["kind"], event["nodes"]) for event in own] == [(f"a: {text}", "remark", ["a"])]


def asked(master: MasterProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command about the job of a master that is a service."""
    words = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", *arguments, f"--master={master.address}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.full
def test_a_service_is_asked_by_commands(tmp_path: Path) -> None:
    """Lines for people and objects for programs; a reader that follows hears of what comes."""
    with master_process(tmp_path / "s.sqlite") as master:
        agent = Agent(master.address, "a")
        agent.register(settings((1, 2)))
        watched = agent.watch()
        next(watched)
        words = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "events", "--follow", "--json"]
        with subprocess.Popen([*words, f"--master={master.address}"], stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert json.loads(reader.stdout.readline())["kind"] == "registered"
            stopped = asked(master, "stop", "--no-wait")
            assert "1 node save" in stopped.stdout
            said = map(json.loads, reader.stdout)
            assert next(event["text"] for event in said if event["kind"] == "ordered") == "the job stops by order"
            reader.kill()
        refused = asked(master, "start")
        assert (refused.returncode, "still being stopped" in refused.stderr) == (1, True)
        watched.cancel()
        agent.channel.close()
        late = asked(master, "stop", "--timeout=30")
        assert "run-0001 goes on from step 0" in late.stdout
        assert asked(master, "start", "--json").returncode == 0
        lines = asked(master, "events", "--after=2").stdout.splitlines()
        assert lines[0].startswith("3 ")
        assert any(" stopped: the job was stopped by order" in line for line in lines)
        assert asked(master, "drain", "nobody").returncode == 1
    alone = asked(master, "events")
    assert (alone.returncode, "does not answer" in alone.stderr) == (1, True)


def test_a_save_that_its_master_did_not_see_is_not_called_done(tmp_path: Path) -> None:
    """An embedded master ends with its job, which carries out a stop, but no save."""
    with master_process(tmp_path / "s.sqlite") as master:
        agent = Agent(master.address, "a")
        agent.register(settings((1, 1)))
        watched = agent.watch()
        for directive in watched:
            if directive.WhichOneof("order") == "run":
                break
            if directive.WhichOneof("order") in ("gather", "wait"):
                agent.join(directive)
        agent.progress(1, 3)
        private = tmp_path / ".dalsegno" / "job"
        private.mkdir(parents=True)
        claim = {"host": "h", "boot_id": "b", "pid": 1, "start_time": 1, "generation": 1, "counter": 1}
        (private / "claim.json").write_text(json.dumps({**claim, "address": master.address}), encoding="utf-8")
        (private / "token").write_text("x" * 32, encoding="ascii")
        (private / "token").chmod(0o600)
        words = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "checkpoint", "--timeout=60"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*words, f"--checkpoint-dir={tmp_path}"], **pipes, text=True) as waiting:
            assert waiting.stdout is not None
            assert "behind step 3" in waiting.stdout.readline()
            master.kill()
            said = waiting.communicate(timeout=60)
            assert (waiting.returncode, said[0], "nobody runs job job just now" in said[1]) == (1, "", True)
        watched.cancel()
        agent.channel.close()


@pytest.mark.full
def test_what_happened_to_a_job_whose_own_master_is_gone_is_on_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a reader has missed that was there when the master ended; a damaged record, or none, says nothing."""
    private = tmp_path / ".dalsegno" / "job"
    private.mkdir(parents=True)
    store = private / "master.sqlite"
    words = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "events", f"--checkpoint-dir={tmp_path}"]

    def told(*more: str) -> tuple[list[str], str]:
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1, "the job is not finished"
        return done.stdout.splitlines(), done.stderr

    with master_process(store) as master:
        claim = {"host": "h", "boot_id": "b", "pid": 1, "start_time": 1, "generation": 1, "counter": 1}
        (private / "claim.json").write_text(json.dumps({**claim, "address": master.address}), encoding="utf-8")
        (private / "token").write_text("x" * 32, encoding="ascii")
        (private / "token").chmod(0o600)
        assert asked(master, "stop").returncode == 0
        alive = asked(master, "events").stdout.splitlines()
    assert any("the job stops by order" in line for line in alive)
    before = store.read_bytes()
    for _ in range(2):
        lines, error = told()
        assert lines == alive
        assert error.startswith("dalsegno: nobody runs job job just now")
    assert told("--after=1")[0] == alive[1:]
    assert [json.loads(line)["sequence"] for line in told("--json", "--follow")[0]] == [*range(1, len(alive) + 1)]
    with monkeypatch.context() as site:
        (tmp_path / "sitecustomize.py").write_text("print('loading {modules}', flush=True)", encoding="utf-8")
        site.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        assert told()[0] == ["loading {modules}", *alive], "what a site prints is no part of the record"
    assert store.read_bytes() == before, "the next master goes on with it"
    store.write_bytes(before[:-100] + bytes(100))
    lines, error = told()
    assert (lines, len(error.splitlines())) == ([], 2), "why not, and how the job stands"
    store.unlink()
    lines, error = told()
    assert (lines, "there is no store" in error) == ([], True)
    assert not store.exists()


def test_who_has_seen_enough_of_the_events_sees_no_traceback(tmp_path: Path) -> None:
    """Neither with Ctrl-C nor with a reader, like `head`, that has closed its end."""
    with master_process(tmp_path / "s.sqlite") as master:
        assert asked(master, "stop").returncode == 0
        words = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "events", f"--master={master.address}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*words, "--follow"], **pipes, text=True) as reader:
            assert reader.stdout is not None
            assert "the job stops by order" in reader.stdout.readline()
            reader.send_signal(signal.SIGINT)
            assert reader.communicate(timeout=30)[1] == ""
            assert reader.returncode == 128 + signal.SIGINT
        with subprocess.Popen(words, **pipes, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stderr is not None
            reader.stdout.close()
            assert (reader.wait(30), reader.stderr.read()) == (1, "")


@pytest.mark.full
def test_an_order_that_cannot_be_carried_out_says_why(clusters: Clusters) -> None:
    """One line each, and the exit code of a refusal."""
    job = clusters(universal="", training=Training(steps=60, save_every=0))
    job.open("a")
    assert "no node of the job is called 'b': it has a" in dalsegno(job, "drain", "b", code=1)["error"]
    assert "is not stopped" in dalsegno(job, "start", code=1)["error"]
    late = dalsegno(job, "stop", "--no-wait")
    assert "1 node save" in late["text"]
    job.node("a").expected = STOPPED
    job.wait_exit()
