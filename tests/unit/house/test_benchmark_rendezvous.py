"""What the benchmark of many nodes makes of its measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks.__main__ as command
from benchmarks import rendezvous
from benchmarks.cluster import SceneFailed
from benchmarks.rendezvous import Options, Results, Scenes, counts, exponent, growth, judged
from benchmarks.swarm import spread
from tests.support.jobs import foreign


def row(nodes: int, cpu: float, **fields: object) -> rendezvous.Row:
    return {"nodes": nodes, "scene": "forming", "master CPU (s)": cpu, "master (%)": 1.0, "remark": ""} | fields


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_fit_finds_the_power(power: float) -> None:
    """Linear costs give 1, quadratic ones 2, whatever the factor."""
    assert exponent({n: 0.003 * n**power for n in (10, 100, 1000, 2000)}) == pytest.approx(power, abs=1e-9)


def test_growth_leaves_out_what_failed() -> None:
    """A scene that broke off says nothing about its cost, and one point makes no line."""
    results = Results([row(10, 1.0), row(100, 10.0), row(1000, 1.0, remark="a world: not within 60 s")])
    results.sizes = {"run": {10: 300, 100: 301}}
    fits, sizes = growth(results)
    assert fits["grows as N^"] == pytest.approx(1.0)
    assert "N=1,000" not in fits
    assert (sizes["N=10"], sizes["N=100"]) == (300, 301)
    assert growth(Results([row(10, 1.0)])) == []


def test_what_is_late_is_not_kept() -> None:
    """A scene is judged by its limits, one that failed never passes, and where nothing is asked nothing is said."""
    assert judged(row(10, 1.0, late=False))["kept"] == "yes"
    assert judged(row(10, 1.0, late=True))["kept"] == "no"
    assert judged(row(10, 1.0, late=False, failed="no answer")) == row(10, 1.0, kept="no", remark="no answer")
    assert judged(row(100, 1.0, scene="steady"))["kept"] == ""
    for percent, kept in ((14.0, "yes"), (16.0, "no")):
        assert judged(row(1000, 1.0, scene="steady") | {"master (%)": percent})["kept"] == kept


def test_every_node_has_a_role() -> None:
    """One, half, and at least one more: all of them together are the job."""
    for nodes in (3, 4, 5, 10, 999, 1000):
        assert sum(counts(nodes)) == nodes
        assert counts(nodes)[1] == nodes // 2
        assert min(counts(nodes)) >= 1


def test_after_a_failed_scene_the_next_has_a_new_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What broke one scene must not spoil the others, and each is run once."""
    seen: list[str] = []
    scenes = ["steady", "one_silent", "one_closed", "half_closed", "half_silent", "restart", "progress", "ordered"]
    with_memory = ["memory"]

    @contextlib.contextmanager
    def cluster(settings: object) -> Iterator[None]:
        seen.append("cluster")
        yield

    def scene(name: str) -> object:
        def run(self: Scenes) -> None:
            seen.append(name)
            if name == "one_closed":
                raise SceneFailed(name)

        return run

    monkeypatch.setattr(rendezvous, "Cluster", cluster)
    for name in ("form", *scenes, *with_memory):
        monkeypatch.setattr(Scenes, name, scene(name))
    rendezvous.measure(Results(), 10, Options([10], 1.0, 15.0, 0))
    again = scenes.index("one_closed") + 1
    begins = ["cluster", "form"]
    assert seen == [*begins, *scenes[:again], *begins, *scenes[again:], *begins, *with_memory]


def test_waits_are_summed_up() -> None:
    """Median, 99th percentile and maximum, also of few."""
    assert spread([0.3]) == {"count": 1, "p50": 0.3, "p99": 0.3, "max": 0.3}
    assert spread([i / 1000 for i in range(1000, 0, -1)]) == {"count": 1000, "p50": 0.501, "p99": 0.991, "max": 1.0}


def test_without_a_card_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark of cards is one of all, also where there is none."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["gpu"]) == 0
    assert "no card here: nothing was measured" in capsys.readouterr().out


def test_flags_go_to_their_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks rendezvous --nodes 10` is that benchmark's own command line; other names take none."""
    given: list[list[str]] = []
    monkeypatch.setitem(command.WITH_FLAGS, "rendezvous", lambda flags: given.append(list(flags)) or 7)
    assert command.main(["rendezvous", "--nodes", "10,100"]) == 7
    assert given == [["--nodes", "10,100"]]
    with pytest.raises(SystemExit):
        command.main(["sampler", "--nodes=10"])


@pytest.mark.parametrize("flags", [["--nodes=2"], ["--commits=10"]])
def test_what_cannot_be_measured_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes have no half to lose and a third to stay."""
    with pytest.raises(SystemExit):
        rendezvous.main(flags)
    assert "at least 3 nodes and 100 commits" in capsys.readouterr().err


@pytest.mark.parametrize(("late", "code"), [(False, 0), (True, 1)])
def test_a_limit_that_was_not_kept_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, late: bool, code: int
) -> None:
    """As with the other benchmarks that have a goal: whoever runs all of them sees it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        rendezvous, "measure", lambda results, nodes, options: results.rows.append(judged(row(nodes, 1.0, late=late)))
    )
    monkeypatch.setattr(rendezvous, "report", lambda *_, **__: None)
    assert rendezvous.main(["--nodes=10", "--commits=0"]) == code


def test_without_a_package_index_a_benchmark_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those behind it in `make bench` still run."""
    monkeypatch.setattr(foreign, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert command.main(["flash"]) == 0
    assert "left out: dlrover cannot be installed: ERROR: No matching distribution" in capsys.readouterr().out
    with pytest.raises(pytest.skip.Exception, match="dlrover cannot be installed"):
        foreign.installed(*foreign.DLROVER)
