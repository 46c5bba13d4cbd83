"""What an agent's command line makes of its configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dalsegno.agent.commands import launch
from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.script import Script
from dalsegno.protos.contract import GROW_SOON_SECONDS
from dalsegno.protos.options import UsageError

DLROVER = "from dlrover.trainer.torch.elastic.trainer import ElasticTrainer"


@pytest.mark.parametrize(
    ("flags", "tls"),
    [
        (("--master=h:1",), False),
        (("--master=h:1", "--tls-ca=ca.pem"), True),
        # The master's certificate is checked with the system's roots.
        (("--master=h:1", "--tls-cert=c.pem", "--tls-key=k.pem"), True),
        # An embedded master speaks plaintext on this machine, and the flag has no effect.
        (("--tls-ca=ca.pem",), False),
    ],
)
def test_agents_speak_with_each_other_as_with_the_master(tmp_path: Path, flags: tuple[str, ...], tls: bool) -> None:
    options = parse(["--job-id=job", "--memory-bandwidth=2MB", *flags, "train.py"], {})
    script = Script(sys.executable, ("-u", "train.py"))
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, script)  # type: ignore[arg-type]
    assert (config.tls, config.memory_bytes_per_second) == (tls, 2_000_000)


@pytest.mark.parametrize("name", ["abc", ""])
def test_an_event_handler_that_torch_does_not_have(tmp_path: Path, name: str) -> None:
    """Torch looks it up only when the run is over: a finished one ended with a traceback, and 1."""
    options = parse(["--job-id=job", f"--event-log-handler={name}", "train.py"], {})
    with pytest.raises(UsageError, match=f"argument --event-log-handler: torch has no handler '{name}'"):
        launch._torch_config(options, tmp_path)
    options.event_log_handler = "console"
    launch._torch_config(options, tmp_path)


@pytest.mark.parametrize(
    "flag",
    [
        "--virtual-local-rank",
        "--numa-binding=node",
        "--duplicate-stdout-filters=loss",
        "--duplicate-stderr-filters=loss",
        "--event-log-handler=console",
    ],
)
def test_a_flag_that_the_installed_torch_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """An older one took it and did nothing; torch's own parser ends there."""

    def older(*_: object) -> tuple[SimpleNamespace, str, list[str]]:
        return SimpleNamespace(nproc_per_node=1), "python", []

    monkeypatch.setattr("torch.distributed.run.config_from_args", older)
    launch._torch_config(parse(["--job-id=job", "train.py"], {}), tmp_path)
    with pytest.raises(UsageError, match=rf"^argument {flag.partition('=')[0]}: torch \S+ does not have it$"):
        launch._torch_config(parse(["--job-id=job", flag, "train.py"], {}), tmp_path)


@pytest.mark.parametrize(
    ("flags", "hinted"),
    [
        (("--rdzv-endpoint=h:1",), True),
        (("--rdzv-endpoint=h:1", "--rdzv-backend=etcd"), True),
        (("--master=h:1",), False),
        (("--master=h:1", "--rdzv-endpoint=i:1"), False),
        (("--rdzv-endpoint=h:1", "--rdzv-backend=c10d"), False),
        ((), False),
    ],
)
def test_an_endpoint_alone_is_a_masters(tmp_path: Path, flags: tuple[str, ...], hinted: bool) -> None:
    """If none answers there, torchrun's users are told how one of their nodes hosts it."""
    options = parse(["--job-id=job", *flags, "train.py"], {})
    script = Script(sys.executable, ("-u", "train.py"))
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, script)  # type: ignore[arg-type]
    assert config.hint == ("; with --rdzv-backend=c10d the node with that address hosts one" if hinted else "")


@pytest.mark.parametrize(
    ("flags", "token", "hinted"),
    [
        (("--rdzv-backend=c10d", "--rdzv-endpoint=h:1"), "sesame-sesame", True),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=h:1"), None, False),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--token-file=t"), "sesame-sesame", False),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--tls-ca=c"), "sesame-sesame", False),
        (("--master=h:1",), "sesame-sesame", False),
        ((), "sesame-sesame", False),
    ],
)
def test_a_token_in_the_environment_keeps_a_node_from_hosting_the_master(
    tmp_path: Path, flags: tuple[str, ...], token: str | None, hinted: bool
) -> None:
    """torchrun's line in a shell that has a token exported waited for a master that nobody had started."""
    options = parse(["--job-id=job", *flags, "train.py"], {})
    script, directory = Script(sys.executable, ("-u", "train.py")), SimpleNamespace(root=tmp_path)
    config = launch._agent_config(options, 1, directory, tmp_path, script, token)  # type: ignore[arg-type]
    told = "; with DALSEGNO_TOKEN it is taken for a master that is a service: if there is to be none, unset that, and"
    assert config.hint == (f"{told} the node with that address hosts one" if hinted else "")


@pytest.mark.parametrize(
    ("flags", "hinted"),
    [
        ((), True),
        (("--nnodes=2",), True),
        (("--master=h:1",), False),
        (("--master=i:1",), False),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=h:1"), False),
        (("--standalone",), False),
    ],
)
def test_a_master_that_only_a_variable_names_may_be_another_launchers(
    tmp_path: Path, flags: tuple[str, ...], hinted: bool
) -> None:
    """DLRover's operator sets it for its own: where none of ours answers, the line names the variable.

    What to do if it is DLRover's stands apart: it holds only where a stranger answers.
    """
    options = parse(["--job-id=job", *flags, "train.py"], {"DLROVER_MASTER_ADDR": "h:1"})
    script = Script(sys.executable, ("-u", "train.py"))
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, script)  # type: ignore[arg-type]
    assert ("the variable DLROVER_MASTER_ADDR names it" in config.hint) == hinted
    assert ("unset it" in config.advice) == hinted
    assert "unset" not in config.hint


@pytest.mark.parametrize(
    ("flags", "text", "own", "seconds", "adopts"),
    [
        # No commit can come: nobody waits for one.
        ((), "import torch", (), GROW_SOON_SECONDS, False),
        (("--grow-wait=auto",), "import torch", ("--out=here",), GROW_SOON_SECONDS, False),
        # One can.
        ((), "import torch", ("--out=${save_dir}",), -1.0, True),
        ((), "import dalsegno.elastic", (), -1.0, False),
        # None can, and steps are heard: whether any are made decides.
        ((), f"{DLROVER}\nElasticTrainer(model)", (), -1.0, False),
        ((), f"{DLROVER}\nElasticTrainer(model)\ntorch.load('mine.pt')", (), GROW_SOON_SECONDS, False),
        ((), f"{DLROVER}\nElasticTrainer(model)  # torch.load('mine.pt')", (), -1.0, False),
        (
            (),
            f"{DLROVER}\nfrom dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer\nElasticTrainer()",
            (),
            GROW_SOON_SECONDS,
            False,
        ),
        # A person has said how long.
        (("--grow-wait=40",), "import torch", (), 40.0, False),
        (("--grow-wait=40",), "import torch", ("--out=${save_dir}",), 40.0, True),
    ],
)
def test_a_growth_waits_for_commits_that_can_come(
    tmp_path: Path, flags: tuple[str, ...], text: str, own: tuple[str, ...], seconds: float, adopts: bool
) -> None:
    """Whether any can is known by the script and its arguments."""
    (tmp_path / "train.py").write_text(text)
    options = parse(["--job-id=job", *flags, str(tmp_path / "train.py"), *own], {})
    script = Script(sys.executable, ("-u", str(tmp_path / "train.py"), *own))
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, script)  # type: ignore[arg-type]
    assert (config.settings.grow_wait, config.adopts) == (seconds, adopts)


@pytest.mark.parametrize("files", [("train.py",), ("train/__main__.py",), ("train/__main__.py", "train/loop.py")])
def test_a_module_is_read_as_a_script_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]
) -> None:
    """A join threw away all of its work, and with `--dlrover-fixes` its batch was another one in smaller worlds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / files[0]).parent.mkdir(exist_ok=True)
    (tmp_path / files[0]).write_text("from train.loop import main")
    (tmp_path / files[-1]).write_text(f"{DLROVER}\ntrainer = ElasticTrainer(model)\nwith trainer.step():\n    pass\n")
    options = parse(["--job-id=job", "--dlrover-fixes", "-m", "train"], {})
    script = Script(sys.executable, ("-u", "-m", "train"))
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, script)  # type: ignore[arg-type]
    assert (config.settings.grow_wait, config.dlrover_fixes) == (-1.0, "each")


def test_what_a_script_itself_says_of_dlrover_counts_alone(tmp_path: Path) -> None:
    """A module beside it that loads its data is no reason to restart it."""
    (tmp_path / "data.py").write_text("import json\njson.load(file)")
    (tmp_path / "train.py").write_text(f"import data\n{DLROVER}\nElasticTrainer(model)")
    options = parse(["--job-id=job", str(tmp_path / "train.py")], {})
    script = Script(sys.executable, ("-u", str(tmp_path / "train.py")))
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, script)  # type: ignore[arg-type]
    assert config.settings.grow_wait == -1.0
