"""What a Commander refuses before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")
pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.master import cli
from dalsegno.master.commander import Commander
from dalsegno.master.record.store import Store
from dalsegno.master.server.server import ServerOptions
from dalsegno.protos.options import UsageError
from tests.support.jobs.commander import run_file


def never(store: Store) -> None:
    """No record is looked at."""
    raise AssertionError


def test_bad_files_and_stores_are_one_line(tmp_path: Path) -> None:
    """Each says what to change."""
    good, other = run_file(tmp_path), run_file(tmp_path, "b")
    bad = tmp_path / "bad.yaml"
    bad.write_text(json.dumps({**json.loads(good.read_text()), "kommand": 1}), encoding="utf-8")
    same = tmp_path / "same.yaml"
    same.write_text(good.read_text(), encoding="utf-8")
    for files, store, port, line in [
        ([bad], "sqlite:///c.db", 0, "kommand: there is no such key, did you mean command?"),
        ([good, same], "sqlite:///c.db", 0, "there is another run 'my-run'"),
        ([tmp_path / "none.yaml"], "sqlite:///c.db", 0, "none.yaml cannot be read"),
        ([good], "etcd://localhost:1", 0, "with --relay each run has a file"),
        ([good], "sqlite:////", 0, "names no file"),
        ([good, other], "sqlite:///c.db", 65535, "each of 2 runs needs a port"),
    ]:
        with pytest.raises(UsageError, match=r"\A[^\n]+\Z") as refused:
            Commander(files, store, ServerOptions(port=port), wait=never)
        assert line in str(refused.value)
    assert not list(tmp_path.glob("c.*"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--relay=r.yaml"], "--relay needs --http-port"),
        (["--relay=r.yaml", "--http-port=0", "--job-id=x"], "--job-id and --relay do not go together"),
        (["--relay=r.yaml", "--http-port=0", "--embedded"], "--embedded and --relay do not go together"),
        (["--relay=r.yaml", "--http-port=0", "--nnodes=2"], "--nnodes and --relay do not go together"),
        ([], "--job-id is missing"),
    ],
)
def test_flags_that_do_not_go_together(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one line."""
    assert cli.main([*arguments, "--store=sqlite:///c.db"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n"), line in said.err) == ("", 1, True)
