"""The benchmark of many nodes, with few: every scene runs against the real master."""

from __future__ import annotations

import signal

import pytest

from benchmarks import rendezvous
from benchmarks.cluster import Cluster, SceneFailed
from benchmarks.rendezvous import Options, Results, Scenes

pytestmark = pytest.mark.timeout(240)

SCENES = {
    "forming",
    "steady",
    *("one silent", "one silent, back", "one closed", "one closed, back"),
    *("half closed", "half closed, back", "half silent", "half silent, back"),
    *("half closed, master killed", "half closed, master killed, back"),
    "progress",
    *("saved by order", "one drained by order", "scaled by order", "stopped by order"),
}
NODE_TIMEOUT = 5.0


@pytest.mark.full
def test_five_nodes_pass_through_every_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    """All worlds form, no call fails where nothing is lost, and the silent are lost by nothing but silence."""
    monkeypatch.setattr(rendezvous, "REPORT_SECONDS", 1.5)
    results = Results()
    rendezvous.measure(results, 5, Options([5], steady=2.0, node_timeout=NODE_TIMEOUT, commits=0))
    rows = {row["scene"]: row for row in results.rows}
    assert [row["remark"] for row in results.rows] == [""] * len(SCENES)
    assert set(rows) == SCENES
    for row in results.rows:
        assert row["master CPU (s)"] >= 0
        assert row["master MiB"] > 1
        assert (row["formed (s)"] is None) == (row["scene"] in ("steady", "progress"))
    for scene in ("one silent", "half silent"):
        # The last heartbeat may be as old as a heartbeat's interval.
        assert rows[scene]["noticed (s)"] > NODE_TIMEOUT - 2
    steady = [call for call in results.calls if call["scene"] == "steady"]
    assert {call["swarm"] for call in steady} == {"one", "half", "stay"}
    assert all(call["answered"] > 0 and call["failed"] == 0 for call in steady if call["call"] == "Heartbeat")
    assert "CommitCheckpoint" in {call["call"] for call in results.calls}
    assert {"run", "gather"} <= set(results.sizes)


@pytest.mark.full
def test_the_record_grows_by_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many checkpoints are recorded as were asked for, and the master starts again with them."""
    monkeypatch.setattr(rendezvous, "MARKS", (60,))
    monkeypatch.setattr(rendezvous, "LAST_COMMITS", 20)
    rows = rendezvous.record(Options([], steady=0.0, node_timeout=NODE_TIMEOUT, commits=100))
    assert [row["checkpoints"] for row in rows] == [60, 100]
    assert rows[-1]["restart (s)"] > 0


def test_a_master_that_ends_is_a_finding() -> None:
    """A scene whose master dies fails at once and says so, instead of waiting for its limit."""
    options = Options([3], steady=0.0, node_timeout=NODE_TIMEOUT, commits=0)
    results = Results()
    with Cluster(rendezvous.settings(3, options)) as cluster:
        scenes = Scenes(3, options, cluster, results)
        scenes.form()
        cluster.master.signal(signal.SIGKILL)
        with pytest.raises(SceneFailed, match="the master ended"):
            scenes.one_closed()
    assert [row["kept"] for row in results.rows] == ["yes", "no"]
    assert "the master ended" in results.rows[1]["remark"]


def test_nodes_that_cannot_take_part_end_the_measurement() -> None:
    """Settings that the master refuses are said with its reason, instead of a world that never forms."""
    with pytest.raises(RuntimeError, match="node-timeout"):
        rendezvous.measure(Results(), 3, Options([3], steady=1.0, node_timeout=0.5, commits=0))
