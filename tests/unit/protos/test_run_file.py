"""`run.yaml`: what a person may write there, and the one line for each thing that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.protos.run_file import Hub, read_run_file
from dalsegno.protos.yaml_text import InputRefused, printed

LEAST: dict[str, Any] = {
    "run_id": "sft-7",
    "commander": "https://relay.example:8443/",
    "l1_root": "/volume",
    "command": ["python", "train.py", "--out", "${save_dir}"],
}


def write(path: Path, **changes: Any) -> Path:
    values = {key: value for key, value in (LEAST | changes).items() if value is not ...}
    path.write_text(printed([values]), encoding="utf-8")
    return path


def test_the_least_and_all_of_it(tmp_path: Path) -> None:
    """Four keys are enough; every other one has a default or a meaning."""
    run = read_run_file(write(tmp_path / "run.yaml"))
    assert (run.commander, run.keep_last, run.lease_seconds, run.hf) == ("https://relay.example:8443", 3, 180.0, None)
    improve = {"metric": "eval_loss", "mode": "min", "min_delta": 0.01, "metrics_file": "metrics.jsonl"}
    run = read_run_file(
        write(
            tmp_path / "run.yaml",
            resume_flag="--resume",
            checkpoint_glob="step_*",
            save_signal="SIGUSR1",
            hf={"repo": "me/model", "interval_seconds": 60, "on_improve": improve, "upload_limit": 10**6},
            baseline={"hf": "you/base@main"},
            manifest={"git_sha": "abc", "hyperparameters": {"lr": 0.1}},
        )
    )
    assert run.hf is not None
    assert run.hf.on_improve is not None
    assert (run.hf.repo, run.hf.on_improve.metric, run.hf.upload_limit) == ("me/model", "eval_loss", 10**6)
    assert (run.baseline is not None and run.baseline.hf, run.manifest["git_sha"]) == ("you/base@main", "abc")


@pytest.mark.parametrize(
    ("hf", "metrics"),
    [
        ({}, None),
        ({"metrics_file": "/m/loss"}, "/m/loss"),
        ({"on_improve": {"metric": "x"}}, "metrics.jsonl"),
        ({"metrics_file": "a", "on_improve": {"metric": "x"}}, "a"),
        ({"metrics_file": "a", "on_improve": {"metric": "x", "metrics_file": "a"}}, "a"),
    ],
)
def test_one_metrics_file_is_for_both(hf: dict[str, Any], metrics: str | None) -> None:
    """What goes with a milestone, and what says that one is due."""
    assert Hub.model_validate({"repo": "me/m", **hf}).metrics == (None if metrics is None else Path(metrics))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run_id": "a/b"}, "run_id: 'a/b' is no name for a directory"),
        ({"run_id": ...}, "run_id: missing"),
        ({"comand": ["x"]}, "comand: there is no such key, did you mean command?"),
        ({"hf": {"repo": "me/m", "privat": True}}, "hf.privat: there is no such key, did you mean private?"),
        ({"command": ["python", "train.py"]}, "command: no word of it has ${save_dir}"),
        ({"command": []}, "command: it is empty"),
        ({"command": "python train.py ${save_dir}"}, "command: it is a list of words, like [python, train.py"),
        ({"command": ["python", "${save_dir}", 5]}, "command.2: it is text: put it in quotes"),
        ({"command": ["python", "${save_dir}\0"]}, "command.1: a NUL character"),
        ({"commander": "relay:8443"}, "commander: 'relay:8443' is no URL like https://HOST:8443"),
        ({"commander": "https://h/x"}, "only the scheme, the host and the port belong there"),
        ({"commander": "https://h:1?"}, "only the scheme, the host and the port belong there"),
        ({"commander": "https://h:99999"}, "its port is no number from 1 to 65535"),
        ({"commander": "https://h:http"}, "its port is no number from 1 to 65535"),
        ({"commander": "https://h:0"}, "its port is no number from 1 to 65535"),
        ({"commander": "https://a b:1"}, "is no URL like https://HOST:8443"),
        ({"commander": "https://[::1:1"}, "Invalid IPv6 URL"),
        ({"l1_root": "/a\0b"}, "l1_root: it is '/a"),
        ({"l1_root": "/" + "a" * 5000}, "l1_root: it is 5001 long"),
        ({"keep_last": True}, "keep_last: it is a whole number"),
        ({"interval_seconds": True}, "interval_seconds: it is a number"),
        ({"interval_seconds": "600"}, "interval_seconds: it is a number, without quotes"),
        ({"interval_seconds": 0}, "interval_seconds: Input should be greater than 0"),
        ({"checkpoint_glob": ""}, "checkpoint_glob: '' is no pattern"),
        ({"checkpoint_glob": "../*"}, "checkpoint_glob: '../*' is no pattern"),
        ({"checkpoint_glob": "/etc/*"}, "checkpoint_glob: '/etc/*' is no pattern"),
        ({"resume_flag": ""}, "resume_flag: it is empty"),
        ({"save_signal": "SIGRTMIN+99"}, "save_signal: 'SIGRTMIN+99' is no signal"),
        ({"hf": "me/m"}, "hf: keys and values belong there"),
        ({"hf": {"repo": "me/m..n"}}, "hf.repo: 'me/m..n' is no OWNER/NAME of the hub"),
        ({"hf": {"repo": "me/m.git"}}, "hf.repo: 'me/m.git' is no OWNER/NAME of the hub"),
        ({"hf": {"repo": "me/m", "on_improve": {"metric": "a\nb"}}}, r"'a\nb' has characters that cannot be printed"),
        ({"hf": {"repo": "me/m", "on_improve": {"metric": "x", "metrics_file": "../m"}}}, "'../m' is no file below"),
        ({"hf": {"repo": "me/m", "on_improve": {"metric": "x", "metrics_file": ""}}}, "'.' is no file below"),
        ({"hf": {"repo": "me/m", "metrics_file": "../m"}}, "hf.metrics_file: '../m' is no file below"),
        (
            {"hf": {"repo": "me/m", "metrics_file": "a", "on_improve": {"metric": "x", "metrics_file": "b"}}},
            "hf: metrics_file and on_improve.metrics_file name two files: say it once",
        ),
        ({"baseline": {"hf": "a/b@../c"}}, "baseline: 'a/b@../c' is no OWNER/NAME@REVISION"),
        ({"baseline": {"hf": "a/b--c@main"}}, "baseline: 'a/b--c' is no OWNER/NAME of the hub"),
        ({"manifest": {1: 2}}, "manifest.1: a key is text: put it in quotes"),
        ({"\x1b[31m": 1}, "\\x1b[31m: there is no such key"),
        ({"l1_root": "volume"}, "l1_root: 'volume' is no absolute path"),
        ({"keep_last": 0}, "keep_last: Input should be greater than or equal to 1"),
        ({"interval_seconds": "soon"}, "interval_seconds: it is a number, without quotes"),
        ({"lease_seconds": 1}, "lease_seconds: Input should be greater than or equal to 3"),
        ({"save_signal": "USR1"}, "save_signal: 'USR1' is no signal like SIGUSR1"),
        ({"hf": {"repo": "model"}}, "hf.repo: 'model' is no OWNER/NAME"),
        ({"baseline": {}}, "baseline: it is either hf: OWNER/NAME@REVISION, or command: [...]"),
        ({"baseline": {"hf": "a/b"}}, "baseline: 'a/b' is no OWNER/NAME@REVISION"),
        ({"baseline": {"command": ["pull"]}}, "baseline: no word of the command has ${save_dir}"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """It names the place, the value and what belongs there."""
    with pytest.raises(InputRefused) as refused:
        read_run_file(write(tmp_path / "run.yaml", **changes))
    (line,) = refused.value.lines
    assert line.startswith(f"{tmp_path}/run.yaml: ")
    assert said in line


def aliases_of_aliases(levels: int) -> bytes:
    """Small text, of which each level has ten times as many values as the one before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels + 1):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    "url", ["https://me:pa55w0rd@h:1", "https://:pa55w0rd@h", "me:pa55w0rd@h:8443", "https://h:1/?pa55w0rd"]
)
def test_a_secret_in_the_url_is_not_repeated(tmp_path: Path, url: str) -> None:
    """What people put there by mistake would stand in logs."""
    with pytest.raises(InputRefused) as refused:
        read_run_file(write(tmp_path / "run.yaml", commander=url))
    assert "pa55w0rd" not in str(refused.value)


@pytest.mark.slow
def test_what_is_no_such_file(tmp_path: Path) -> None:
    """No file, no text, no mapping, two documents, a key twice."""
    path = tmp_path / "run.yaml"
    for content, said in (
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe", "cannot be read: it is no UTF-8"),
        (b"- a\n", "one mapping belongs there"),
        (b"a: 1\n---\nb: 2\n", "one mapping belongs there"),
        (b"run_id: a\nrun_id: b\n", "the key run_id stands twice"),
        (b"run_id: [", "this is no YAML"),
        (b"1: 2\n", "1: a key is text"),
        (b"? [a, b]\n: c\n", "a key is a word, no list or mapping"),
        (b"run_id: a\nkeep_last: " + b"9" * 5000, "is no int"),
        (b"keep_last: !!int word\n", "'word' is no int"),
        (b"self_fence: !!bool word\n", "'word' is no bool"),
        (b"manifest: {made: !!timestamp 2020-13-45}\n", "'2020-13-45' is no timestamp"),
        (b"a: " + b"[" * 3000 + b"]" * 3000, "nested too deep"),
        (b"# " + b"x" * (256 << 10), "is larger than 256 KiB"),
        (aliases_of_aliases(8), "it has more than 100000 values, each alias counted"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputRefused, match=said):
            read_run_file(path)
