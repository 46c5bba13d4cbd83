"""Pods, mirrors and people speak TLS to a Commander; a certificate that is not trusted is one line, before all else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")
pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.agent.commands.dalsegno import run as dalsegno
from tests.support.jobs.certificates import Authority, Keys, as_flags, make_keys
from tests.support.jobs.commander import TOKEN, commander, own_lines, run_file
from tests.support.jobs.pods import BLACK_BOX, Run

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys")


@contextlib.contextmanager
def served(folder: Path, keys: Keys, *trainer: str, mutual: bool, steps: int = 30) -> Iterator[Run]:
    """A run whose Commander has a certificate on both of its ports."""
    (folder / "volume").mkdir()
    command = [sys.executable, str(BLACK_BOX), "--output_dir", "${save_dir}", "--log", str(folder / "steps")]
    command += [f"--steps={steps}", *trainer]
    more = {"command": command, "save_signal": "SIGUSR1", "resume_flag": "--resume_from_checkpoint", "lease_seconds": 6}
    server = {name: path for name, path in keys.server(mutual).items() if name != "token-file"}
    with commander(folder / "store.db", [run_file(folder, **more)], *as_flags(server)) as one:
        run = Run(folder, run_file(folder, **more, commander=f"https://{one.http}"), one)
        try:
            yield run
        finally:
            for pod in run.pods:
                pod.vanish()


@pytest.mark.full
@pytest.mark.parametrize("mutual", [False, True])
def test_a_pod_speaks_tls_to_both_ports(tmp_path: Path, keys: Keys, mutual: bool) -> None:
    """The run is finished; with an authority for clients, by a pod that has a certificate of its own."""
    client = {name: path for name, path in keys.client(mutual).items() if name != "token-file"}
    with served(tmp_path, keys, mutual=mutual) as run:
        pod = run.pod("a", *as_flags(client))
        assert pod.process.wait(120) == 0, run.said()
        run.assert_one_history(30)


@pytest.mark.full
def test_an_image_needs_no_flags(tmp_path: Path, keys: Keys) -> None:
    """The variables that the agent has, and the authorities of the system, do as well."""
    with served(tmp_path, keys, mutual=False) as run:
        pod = run.pod("a", PET_TLS_CA=str(keys.ca))
        assert pod.process.wait(120) == 0, run.said()
        again = run.pod("b", SSL_CERT_FILE=str(keys.ca))
        assert again.process.wait(60) == 0, run.said()


@pytest.mark.full
def test_a_certificate_that_is_changed(tmp_path: Path, keys: Keys) -> None:
    """One of the same authority is no news to whoever trains or starts. One of another is as no Commander at all."""
    trusts = f"--tls-ca={keys.ca}"
    other = Authority(tmp_path / "other").issue("master")
    with served(tmp_path, keys, "--pace=0.1", "--end-when-asked", mutual=False, steps=400) as run:
        a = run.pod("a", trusts)
        run.wait_saved()
        keys.authority.issue("master")
        run.commander.again()
        run.wait_saved(run.steps()[-1].step + 1)
        b = run.pod("b", trusts)
        run.wait(lambda: "is a spare" in b.said, "b trusts it")
        assert len(run.epochs()) == 1, "the same trainer"
        for mine, theirs in ((keys.master.path, other.path), (keys.master.key, other.key)):
            mine.write_bytes(theirs.read_bytes())
        run.commander.again()
        c = run.pod("c", trusts)
        assert c.process.wait(60) == 2, run.said()
        assert "is not trusted" in c.said
        run.wait(lambda: run.events("stopped"), "the trainer's end after its lease")
        made = run.steps()[-1].step
        keys.authority.issue("master")
        run.commander.again()
        run.wait_step(made + 1, epoch=2)
        assert [one[0].step for one in run.epochs().values()] == [1, made + 1], "what it had saved is the run's"
        for pod in (a, b):
            pod.vanish()


def test_a_certificate_that_is_not_trusted_is_one_line(
    tmp_path: Path, keys: Keys, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another authority's, none at all, another host's name, the wrong scheme: exit code 2 or 1, nothing is started."""
    other = Authority(tmp_path / "other")
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    with served(tmp_path, keys, mutual=False) as run:
        file = str(run.file)
        for flags, line in (
            ((f"--tls-ca={other.path}",), "is not trusted"),
            ((), "name its authority with --tls-ca"),
            ((f"--tls-ca={tmp_path}/none.pem",), "none.pem cannot be read"),
            ((f"--tls-ca={run.file}",), "holds no PEM certificate"),
            ((f"--tls-ca={keys.ca}", f"--tls-cert={keys.agent.path}"), "--tls-cert and --tls-key belong together"),
        ):
            assert dalsegno(["relay", file, "--no-mount-check", *flags]) == 2, flags
            error = capfd.readouterr().err
            assert (len(own_lines(error)), line in error, TOKEN in error) == (1, True, False), error
        assert dalsegno(["relay", "status", file, f"--tls-ca={keys.ca}"]) == 0
        assert capfd.readouterr().out.startswith("my-run: WAITING")
        assert dalsegno(["relay", "status", file, f"--tls-ca={other.path}"]) == 1
        assert "is not trusted" in capfd.readouterr().err
        host = run.commander.http.replace("127.0.0.1", "localhost")
        assert dalsegno(["relay", "status", file, f"--commander=https://{host}", f"--tls-ca={keys.ca}"]) == 1
        assert "is not trusted" in capfd.readouterr().err
        assert dalsegno(["relay", "status", file, f"--commander=http://{run.commander.http}"]) == 1
        assert "is it https://?" in capfd.readouterr().err
        assert dalsegno(["relay", "status", file, f"--commander=http://{host}", f"--tls-ca={keys.ca}"]) == 2
        assert "has no TLS" in capfd.readouterr().err
        assert not run.events()


@pytest.mark.parametrize("text", ["two words", "a\nb", "schl\u00fcssel-0123456789"])
@pytest.mark.parametrize("name", ["DALSEGNO_TOKEN", "HF_TOKEN"])
def test_a_token_that_no_header_can_carry(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """One line, exit code 2, and the token is not in it: the libraries' own words would repeat it."""
    (tmp_path / "volume").mkdir()
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv(name, text)
    file = run_file(tmp_path, command=["sleep", "${save_dir}"], hf={"repo": "me/it"})
    assert dalsegno(["relay", str(file), "--no-mount-check"]) == 2
    error = capfd.readouterr().err
    assert f"the token in {name} must be one word of printable ASCII" in error
    assert (len(own_lines(error)), text in error) == (1, False), error
