"""The command line of dlrover-run: every torchrun flag, ours, and one clear line for bad input."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from dalsegno.agent.commands import dlrover_run
from dalsegno.agent.commands.arguments import build_parser, parse
from dalsegno.agent.commands.unused import ignored
from dalsegno.protos.options import UsageError


def test_every_flag_of_torchrun_is_known() -> None:
    """A flag that the installed torch has and we don't would be refused."""
    theirs = {flag for action in torchrun.get_args_parser()._actions for flag in action.option_strings}
    ours = {flag for action in build_parser({})._actions for flag in action.option_strings}
    assert theirs - ours == set()


def test_a_run_may_have_no_stall_timeout() -> None:
    """As ranks and the master read 0; a notice of no time is none."""
    assert parse(["--stall-timeout=0", "x.py"], {}).stall_timeout == 0.0
    with pytest.raises(UsageError, match=r"--drain-timeout.*must be more than 0 seconds"):
        parse(["--drain-timeout=0", "x.py"], {})


def test_torch_reads_our_namespace() -> None:
    """What torch's launcher wants of a parsed command line is there, under torch's names."""
    wanted = set(vars(torchrun.get_args_parser().parse_args(["x.py"])))
    ours = set(vars(parse(["x.py"], {})))
    # Without effect here, and under another name so that torch does not act on them.
    assert wanted - ours == {"node_rank", "master_addr", "master_port"}


def test_flags_environment_and_spellings() -> None:
    """The flag wins over the environment, the environment over the default; both spellings are the same."""
    environ = {"PET_NNODES": "2:3", "PET_NODE_TIMEOUT": "7", "PET_UNIVERSAL_CHECKPOINT": "1", "PET_MAX_RESTARTS": "9"}
    options = parse(["--max_restarts=5", "--grow-interval", "auto", "train.py", "--nnodes", "8"], environ)
    assert (options.min_nodes, options.max_nodes) == (2, 3)
    assert options.node_timeout == 7.0
    assert options.universal_checkpoint is True
    assert options.max_restarts == 5
    assert options.grow_interval == -1.0
    assert options.training_script_args == ["--nnodes", "8"]
    assert parse(["x.py"], {}).max_restarts == 3
    empty = {f"PET_{name}": "" for name in ("MASTER", "JOB_ID", "NNODES", "NODE_TIMEOUT", "RUN_AHEAD", "RESUME_STEP")}
    assert vars(parse(["x.py"], empty)) == vars(parse(["x.py"], {}))


@pytest.mark.parametrize(
    ("arguments", "environ", "wanted", "gate"),
    [
        (["x.py"], {}, False, False),
        (["--universal-checkpoint", "x.py"], {}, True, False),
        (["--universal_checkpoint=beside", "x.py"], {}, True, False),
        (["--universal-checkpoint=gate", "x.py"], {}, True, True),
        (["--universal_checkpoint=gate", "--universal-checkpoint", "x.py"], {}, True, False),
        (["x.py"], {"PET_UNIVERSAL_CHECKPOINT": "1"}, True, False),
        (["x.py"], {"PET_UNIVERSAL_CHECKPOINT": "gate"}, True, True),
        (["--universal-checkpoint", "x.py"], {"PET_UNIVERSAL_CHECKPOINT": "gate"}, True, False),
    ],
)
def test_universal_files_beside_the_run_or_before(
    arguments: list[str], environ: dict[str, str], wanted: bool, gate: bool
) -> None:
    """Without a value it takes nothing from what follows; the flag wins over the environment."""
    options = parse(arguments, environ)
    assert (options.universal_checkpoint, options.universal_gate) == (wanted, gate)
    assert options.training_script == "x.py"


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["x.py"], {}, None),
        (["--memory-bandwidth=200MB", "x.py"], {"PET_MEMORY_BANDWIDTH": "1GB"}, 200_000_000),
        (["x.py"], {"PET_MEMORY_BANDWIDTH": "1.5MiB/s"}, 3 << 19),
    ],
)
def test_a_bandwidth_is_a_size_in_a_second(arguments: list[str], environ: dict[str, str], expected: int | None) -> None:
    assert parse(arguments, environ).memory_bandwidth == expected


def test_another_way_to_make_universal_files_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--universal-checkpoint has no value, or =beside, or =gate"):
        parse(["--universal-checkpoint=later", "x.py"], {})


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["x.py"], {}, None),
        (["x.py"], {"DLROVER_MASTER_ADDR": "h:1"}, "h:1"),
        (["--master", "m:2", "x.py"], {"DLROVER_MASTER_ADDR": "h:1"}, "m:2"),
        (["--rdzv-endpoint", "r:3", "x.py"], {"DLROVER_MASTER_ADDR": "h:1"}, "r:3"),
        (["--standalone", "x.py"], {"DLROVER_MASTER_ADDR": "h:1"}, None),
        (["x.py"], {"DLROVER_MASTER_ADDR": "", "PET_MASTER": ""}, None),
    ],
)
def test_where_the_master_is(arguments: list[str], environ: dict[str, str], expected: str | None) -> None:
    """An explicit argument is never overridden by the environment."""
    assert parse(arguments, environ).master == expected


@pytest.mark.parametrize(
    ("arguments", "environ", "word"),
    [
        (["--nnodes=4:1", "x.py"], {}, "did you mean 1:4"),
        (["--nnodes=0", "x.py"], {}, "at least 1"),
        (["--nnodes=a:b", "x.py"], {}, "MIN:MAX"),
        (["--nproc-per-node=0", "x.py"], {}, "at least 1 worker"),
        (["--no-such-flag", "x.py"], {}, "--no-such-flag"),
        (["--checkpoint-glob=/tmp/*", "x.py"], {}, "must be relative to '${save_dir}'"),
        (["--checkpoint-glob=../*", "x.py"], {}, "must be relative to '${save_dir}'"),
        (["--best=loss", "x.py", "${save_dir}"], {}, "'loss' is not METRIC:min or METRIC:max"),
        (["--best=:min", "x.py", "${save_dir}"], {}, "':min' is not METRIC:min or METRIC:max"),
        (["--best=loss:least", "x.py", "${save_dir}"], {}, "'loss:least' is not METRIC:min or METRIC:max"),
        (["--best=" + 257 * "m" + ":min", "x.py", "${save_dir}"], {}, "up to 256 printable characters"),
        (["--best=loss:min", "x.py"], {}, "--best is for a script that gets '${save_dir}'"),
        (["--best=loss:min", "--best-min-delta=-1", "x.py", "${save_dir}"], {}, "'-1' is no number of at least 0"),
        (["--best=loss:min", "--best-min-delta=nan", "x.py", "${save_dir}"], {}, "'nan' is no number of at least 0"),
        (["--best-min-delta=1", "x.py", "${save_dir}"], {}, "--best-min-delta says more about --best=METRIC:min|max"),
        (["--metrics-file=m", "x.py", "${save_dir}"], {}, "--metrics-file says more about --best=METRIC:min|max"),
        (["--best=loss:min", "--metrics-file=../m", "x.py", "${save_dir}"], {}, "'../m' is no file below"),
        (["x.py", "--resume", "${resume_dir}"], {}, "'${resume_dir}' without '${save_dir}'"),
        (["x.py", "--a=${resume_dir:+b}"], {}, "'${resume_dir:+b}' without '${save_dir}'"),
        (["x.py", "--a=${resume_step}"], {}, "'${resume_step}' without '${save_dir}'"),
        (["x.py", "${save_dir:+b}"], {}, "'${save_dir:+b}' without '${save_dir}'"),
        (["--deepspeed-load-universal", "--no-python", "x"], {}, "needs a script in Python"),
        (["--node-timeout=3.9", "x.py"], {}, "so that is the least"),
        (["--drain-timeout=0", "x.py"], {}, "more than 0"),
        (["--drain-timeout=soon", "x.py"], {}, "no number of seconds"),
        (["--grow-interval=-3", "x.py"], {}, "no number of seconds"),
        (["--master=host", "x.py"], {}, "HOST:PORT"),
        (["--master=host:99999", "x.py"], {}, "HOST:PORT"),
        (["x.py"], {"DLROVER_MASTER_ADDR": "nonsense"}, "DLROVER_MASTER_ADDR"),
        (["x.py"], {"PET_NNODES": "4:1"}, "did you mean"),
        (["--job-id=a/b", "x.py"], {}, "no job id"),
        (["--node-unit=3", "--nnodes=1:2", "x.py"], {}, "--node-unit=3 does not fit --nnodes=1:2"),
        (["--node-unit=2", "--nnodes=3:3", "x.py"], {}, "--node-unit=2 does not fit --nnodes=3:3"),
        (["--node-name=a/../b", "x.py"], {}, "the name is 'a/../b': no slashes"),
        (["--node-name=" + 257 * "n", "x.py"], {}, "is 257 long, at most 256"),
        (["--node-name=\x1b[2J", "x.py"], {}, "cannot be printed"),
        (["-m", "--no-python", "x"], {}, "exclude each other"),
        (["--standalone", "--master=h:1", "x.py"], {}, "--standalone"),
        (["--tls-cert=c", "x.py"], {}, "--tls-key"),
        (["--memory-bandwidth=fast", "x.py"], {}, "no size"),
        (["--memory-bandwidth=0", "x.py"], {}, "at least 1MB in a second"),
        (["x.py"], {"PET_MEMORY_BANDWIDTH": "999KB"}, "at least 1MB in a second"),
        (["--memory-budget=" + 400 * "9", "x.py"], {}, "is more than 9007199254740992 bytes"),
        (["--memory-bandwidth=9999TB", "x.py"], {}, "is more than 9007199254740992 bytes"),
        (
            ["--max-restarts=99999999999999", "x.py"],
            {},
            "'99999999999999' is no whole number of at least 0 and at most",
        ),
        (["--keep-checkpoints=4294967296", "x.py"], {}, "and at most 4294967295"),
        (["--memory-replicas=" + 5000 * "9", "x.py"], {}, "and at most 4294967295"),
        (["--nproc-per-node=" + 5000 * "9", "x.py"], {}, "at most 1048576 workers"),
        (["--drain-timeout=1e300", "x.py"], {}, "at most 1000000000 seconds"),
        (["--local-addr=a..b", "x.py"], {}, "'a..b' is no host"),
        (["--master=a..b:1", "x.py"], {}, "'a..b' is no host"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a..b:1", "x.py"], {}, "'a..b:1' is not HOST:PORT"),
        (["--redirects=9", "x.py"], {}, "neither"),
        (["--nnod=2", "x.py"], {}, "--nnod"),
        ([], {}, "training_script"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], environ: dict[str, str], word: str) -> None:
    """The line names the cause."""
    with pytest.raises(UsageError) as error:
        parse(arguments, environ)
    assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_flag_that_names_a_file_or_directory_is_not_empty() -> None:
    """As of a variable of the shell that is not set: Python takes an empty path for the working directory."""
    flags = [one for one in build_parser({})._actions if one.option_strings and one.metavar in ("DIR", "FILE")]
    assert len(flags) >= 9
    for flag in flags:
        name = flag.option_strings[0]
        with pytest.raises(UsageError, match=rf"argument {name}.*: the name is empty: is a variable unset\?"):
            parse([f"{name}=", "x.py"], {})
        assert vars(parse(["x.py"], {f"PET_{flag.dest.upper()}": ""})) == vars(parse(["x.py"], {}))
    with pytest.raises(UsageError, match="is a variable unset"):
        parse(["--initial-checkpoint=", "x.py"], {}, here=False)
    with pytest.raises(UsageError, match=r"argument --initial-checkpoint.* cannot be looked at: File name too long"):
        parse([f"--initial-checkpoint={'n' * 300}", "x.py"], {})


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///mnt/run", "HTTPS://host/x"])
@pytest.mark.parametrize("flag", ["--checkpoint-dir", "--trace-dir", "--token-file"])
def test_a_url_is_no_directory(flag: str, url: str) -> None:
    """It was made as one below the working directory, `./s3:/bucket/run`, which no other node sees."""
    with pytest.raises(UsageError, match=rf"argument {flag}.*: '{url}' is a URL: mount what is there"):
        parse([f"{flag}={url}", "x.py"], {})
    assert parse(["--checkpoint-dir=a:/b", "x.py"], {}).checkpoint_dir == "a:/b"


def test_flags_of_dlrover_are_accepted_with_a_word() -> None:
    """Command lines written for DLRover work, and say what has no effect."""
    options = parse(
        ["--network-check", "--save_at_breakpoint", "--master-port", "29500", "x.py", "--network-check"], {}
    )
    lines = ignored(options)
    assert [line.split()[0] for line in lines] == ["--network-check", "--save-at-breakpoint", "--master-port"]
    assert ignored(parse(["x.py"], {})) == []
    (line,) = ignored(parse(["--tls-ca=ca.pem", "x.py"], {"PET_TOKEN_FILE": "token"}))
    assert line.startswith("--token-file, --tls-ca without --master: no effect")
    assert ignored(parse(["--tls-ca=ca.pem", "--master=h:1", "x.py"], {})) == []


# Those that dlrover-run of DLRover's main branch adds to torchrun's, each as its help spells it first.
DLROVER = (
    *("--precheck=1", "--node_unit=1", "--auto_config", "--auto_tunning", "--exclude-straggler"),
    *("--save_at_breakpoint", "--accelerator=nvidia.com/gpu", "--training_port=60000", "--numa-affinity"),
    *("--membind-policy=bind", "--network-check", "--comm-perf-test", "--ucp_device_type=cpu"),
)


@pytest.mark.parametrize("flag", DLROVER)
def test_every_flag_of_dlrover_is_known(flag: str) -> None:
    """A command line written for it is not refused, and each flag says that it does nothing, but for two that do."""
    name = flag.split("=")[0].replace("_", "-")
    said = [line.split()[0] for line in ignored(parse([flag, "x.py"], {}))]
    assert said == ([] if name in ("--node-unit", "--auto-config") else [name])


@pytest.mark.parametrize(
    ("flag", "value"),
    [("rdzv-conf", "timeout=9"), ("monitor-interval", "5"), ("start-method", "fork"), ("shutdown-timeout", "7")],
)
def test_flags_of_torchrun_without_effect_say_so(flag: str, value: str) -> None:
    """Given as a flag or by environment, even with torch's default; torch's launcher reads what was given."""
    name = flag.replace("-", "_")
    if not hasattr(torchrun.get_args_parser().parse_args(["x.py"]), name):
        pytest.skip(f"torchrun has no --{flag} yet")
    for options in (
        parse([f"--{flag}={value}", "x.py"], {}),
        parse(["x.py"], {f"PET_{name.upper()}": value}),
    ):
        assert [line.split()[0] for line in ignored(options)] == [f"--{flag}"]
        assert str(getattr(options, name)).removesuffix(".0") == value
    default = getattr(torchrun.get_args_parser().parse_args(["x.py"]), name)
    assert getattr(parse(["x.py"], {}), name) == default


def test_a_switch_of_torchrun_without_effect_says_so() -> None:
    """--run-path."""
    assert [line.split()[0] for line in ignored(parse(["--run-path", "x.py"], {}))] == ["--run-path"]
    assert ignored(parse(["--start-method=spawn", "--shutdown-timeout=0", "x.py"], {}))[1:] != []


@pytest.mark.parametrize("can", [False, True])
@pytest.mark.parametrize("given", ["--run-ahead=always", "--run-ahead=auto", "--node-name=a"])
def test_where_nothing_runs_ahead_the_flag_for_it_is_told(
    can: bool, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Python 3.10, to who asks for it."""
    monkeypatch.setattr("dalsegno.agent.commands.unused.CAN_RUN_AHEAD", can)
    told = ["--run-ahead=always has no effect: it needs Python 3.11 or newer"]
    assert ignored(parse([given, "x.py"], {})) == (told if not can and given.endswith("always") else [])


def options_for(script: str, *arguments: str, module: bool = False) -> argparse.Namespace:
    return parse([*(["-m"] if module else []), script, *arguments], {})


def test_the_default_job_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same user, script and arguments: same job, from wherever; any difference: another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train!.py").touch()
    one = dlrover_run.default_job_id(options_for("my train!.py", "--lr", "1"), "ann")
    assert one == dlrover_run.default_job_id(options_for(str(tmp_path / "my train!.py"), "--lr", "1"), "ann")
    others = [
        dlrover_run.default_job_id(options_for("my train!.py", "--lr", "2"), "ann"),
        dlrover_run.default_job_id(options_for("my train!.py", "--lr", "1"), "bob"),
        dlrover_run.default_job_id(options_for("my train!.py", "--lr1"), "ann"),
        dlrover_run.default_job_id(options_for("other.py", "--lr", "1"), "ann"),
        # Bytes that are no UTF-8, as Python has them of a command line.
        dlrover_run.default_job_id(options_for("my train!.py", "--lr\udcff"), "ann"),
        dlrover_run.default_job_id(options_for("my train!\udcff.py", "--lr", "1"), "ann"),
    ]
    assert len({one, *others}) == 7
    for other in others:
        assert parse(["--job-id", other, "x.py"], {}).job_id == other
    assert parse(["--job-id", one, "x.py"], {}).job_id == one
    assert one.startswith("my-train-")


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("No username set in the environment")])
def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """As a container has it, whose user is a number; Python says so in two ways."""

    def fails() -> str:
        raise error

    monkeypatch.setattr(dlrover_run.getpass, "getuser", fails)
    assert dlrover_run.user_name() == str(os.getuid())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["-m", "no_such_module_here.sub"], "no module no_such_module_here"),
        (["--no-python", "no-such-program-here"], "no-such-program-here does not exist"),
        (["--nnodes=4:1", "x.py"], "did you mean 1:4"),
        (["--checkpoint-dir", "/proc/nowhere", "SELF"], "cannot be written"),
        (["--master=127.0.0.1:9", "--connect-timeout=1", "--checkpoint-dir=ck", "--job-id=j", "SELF"], "127.0.0.1:9"),
        pytest.param(
            ["--master", "127.0.0.1:9", "--tls-ca", "no.pem", "--checkpoint-dir", "ck", "SELF"],
            "no.pem",
            marks=pytest.mark.full,
        ),
        (["--master", "127.0.0.1:9", "--token-file", "no", "--checkpoint-dir", "ck", "SELF"], "token file no"),
        pytest.param(["--nproc-per-node", "many", "--checkpoint-dir", "ck", "SELF"], "many", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(60)
def test_the_program_says_one_line_and_exits_with_2(tmp_path: Path, arguments: list[str], word: str) -> None:
    """Bad input of every kind, through the real program."""
    script = tmp_path / "script.py"
    script.write_text("print('started')\n")
    command = [
        sys.executable,
        "-m",
        "dalsegno.agent.commands.dlrover_run",
        *(a.replace("SELF", str(script)) for a in arguments),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert word in lines[0]


@pytest.mark.parametrize("arguments", [["x.py"], [__file__], ["-m", "json.tool"], ["--no-python", "true"]])
def test_a_working_directory_that_is_gone(tmp_path: Path, arguments: list[str]) -> None:
    """Workers would have none either: one line, whatever is to run."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os\nos.rmdir({str(gone)!r})\nfrom dalsegno.agent.commands import dlrover_run\ndlrover_run.main()"
    path = os.pathsep.join(str(Path(part or ".").absolute()) for part in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("dlrover-run: error: the working directory is gone")


def test_a_supervisors_descriptor_that_is_not_open(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By its flag; nothing was made."""
    for number in ("9999", "4294967295"):
        assert dlrover_run.run([f"--tell-fd={number}", f"--checkpoint-dir={tmp_path / 'c'}", __file__], {}) == 2
        assert f"argument --tell-fd: {number} is no descriptor that is open here" in capfd.readouterr().err
    assert not (tmp_path / "c").exists()


def test_without_torch_it_names_the_extra(tmp_path: Path) -> None:
    """On a base install the trainer's command says what to install."""
    (tmp_path / "x.py").touch()
    code = (
        "import importlib.util as u, sys\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
        "from dalsegno.agent.commands import dlrover_run as cli\n"
        "sys.exit(cli.run(['x.py']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "dalsegno[train]" in done.stderr


def test_help_does_not_wait_for_torch() -> None:
    """Help is there at once, because nothing heavy is imported for it."""
    code = (
        "import sys\nfrom dalsegno.agent.commands import dlrover_run as cli\n"
        "try:\n    cli.run(['--help'])\n"
        "except SystemExit:\n    sys.exit(int('torch' in sys.modules or 'grpc' in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--universal-checkpoint" in done.stdout
    # What it does, not only what it is about.
    assert "hand this flag to the script" in " ".join(done.stdout.split())


def test_what_loads_universal_files_needs_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said before anything is started."""
    (tmp_path / "x.py").touch()
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else plain(name))
    options = parse(["--deepspeed-load-universal", str(tmp_path / "x.py")], {})
    with pytest.raises(UsageError, match="deepspeed is not installed here"):
        dlrover_run.run_checked(options, None, None)  # type: ignore[arg-type]
