"""Why a worker ended, as the last lines of its errors tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dalsegno.agent.workers.advice import tells_of_a_peer
from dalsegno.agent.workers.last_words import error_message, last_words


def test_the_last_line_of_the_errors_is_the_reason(tmp_path: Path) -> None:
    """Without torch's `@record` the traceback's last line says it, with the file that has the rest."""
    path = tmp_path / "stderr.log"
    path.write_text("Traceback (most recent call last):\n" + "x" * 100_000 + "\nValueError: boom\n\n")
    assert last_words(str(path), 1) == f"ValueError: boom (see {path})"
    path.write_text("y" * 100_000)
    assert len(last_words(str(path), 1)) < 400
    path.write_text("")
    assert last_words(str(path), 1) == last_words(str(path), -9) == ""
    assert last_words("", 1) == ""
    assert last_words(str(tmp_path / "nothing"), 1) == ""


def test_the_first_line_of_an_error_file_is_cut(tmp_path: Path) -> None:
    """Of torch's `@record`: an exception with a tensor's values is longer than the master takes in one call."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: a NaN in " + "0.123, " * 300_000 + "\nmore"}}))
    said = error_message(str(path))
    assert said.startswith("ValueError: a NaN in 0.123, 0.123")
    assert len(said) == 300
    path.write_text(json.dumps({"message": {"message": "ValueError: boom\nmore"}}))
    assert error_message(str(path)) == "ValueError: boom"


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("a.py:1: UserWarning: old\n  return func(*args, **kwargs)\n", ""),
        ("INFO: loading\n", ""),
        ("Traceback (most recent call last):\n  File x\nOSError: retried\nINFO 12:00 step 4 done\n", ""),
        ("Traceback (most recent call last):\n  File x\nmy.Error: no luck\n", "my.Error: no luck"),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File x\n", "Fatal Python error: Segmentation fault"),
    ],
)
def test_the_reason_of_a_signal_is_not_what_was_printed_last(tmp_path: Path, errors: str, reason: str) -> None:
    """A killed process printed that long before; only an error of Python's counts. The file is named in any case."""
    path = tmp_path / "stderr.log"
    path.write_text(errors)
    assert last_words(str(path), -9) == (f"{reason} (see {path})" if reason else f"see {path}")


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("no licence: ask for one\nINFO: loading\n", "no licence: ask for one"),
        ("no licence\n[2026-11-24 10:00:00,123] [INFO] [engine.py:12:run] stage 1\n", "no licence"),
        ("no licence\n2026-11-24 10:00:00,123 - root - INFO - step 4\n", "no licence"),
        ("no licence\nI1124 10:00:00.123 12 a.cc:5] opened\nDEBUG:root:x\n", "no licence"),
        ("I1124 10:00:00.123 12 a.cc:5] opened\nINFO 12:00 step 4 done\n", ""),
        ("there is no INFORMATION about this\n", "there is no INFORMATION about this"),
        ("ERROR: bad\n", "ERROR: bad"),
    ],
)
def test_what_a_logger_says_went_well_is_no_reason(tmp_path: Path, errors: str, reason: str) -> None:
    """A script that ends itself (`os._exit(3)`) may have logged something behind the line that says why, or nothing."""
    path = tmp_path / "stderr.log"
    path.write_text(errors)
    assert last_words(str(path), 3) == (f"{reason} (see {path})" if reason else f"see {path}")


BEGIN = "Traceback (most recent call last):\n"
OWN = '  File "/tmp/it/train.py", line 10, in main\n    load(path)\n    ^^^^^^^^^^\n'
LIBRARY = f'  File "{json.__file__}", line 346, in loads\n    return decode(s)\n'
KEYS = '\tMissing key(s) in state_dict: "module.a", "module.b".\n\tUnexpected key(s) in state_dict: "a", "b".\n'
ASSERTED = f'  File "{json.__file__}", line 9, in check\n    assert len(self.ckpt_list) > 0\n           ^^^^^^^^^~~~\n'
PRINTED = '  File "/tmp/it/train.py", line 12, in main\n    print(loss)\n    ^^^^^^^^^^^\n'
FULL = "OSError: [Errno 28] No space left on device"
PROGRAM = '  File "/env/lib/python3.11/site-packages/clip/main.py", line 7, in main\n    train()\n'
INSTALLED = '  File "/env/lib/python3.11/site-packages/torch/nn/module.py", line 5, in forward\n    return f(x)\n'


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (f"{OWN}{LIBRARY}ValueError: boom\n", "ValueError: boom (train.py, line 10, in main)"),
        (f"{OWN}{INSTALLED}ValueError: boom\n", "ValueError: boom (train.py, line 10, in main)"),
        # A program of a package (`-m`): its own last line, not torch's.
        (f"{PROGRAM}{INSTALLED}ValueError: boom\n", "ValueError: boom (main.py, line 7, in main)"),
        (f"{OWN}{PROGRAM}{INSTALLED}ValueError: boom\n", "ValueError: boom (train.py, line 10, in main)"),
        (
            f"{OWN}RuntimeError: Error(s) in loading:\n{KEYS}[W1 a.cpp:5] bye\n",
            'Missing key(s) in state_dict: "module.a", "module.b". Unexpected key(s) in state_dict: "a", "b". (train',
        ),
        (f"{OWN}ValueError: not this:\nnor that\n", "ValueError: not this: (train.py, line 10, in main)"),
        # The message has several lines, and a library says something at the end.
        (f"{OWN}RuntimeError: CUDA error: x\nCompile with it.\n[W1 a.cpp:5] bye\n", "RuntimeError: CUDA error: x ("),
        (f"{OWN}KeyboardInterrupt\n", "KeyboardInterrupt (train.py, line 10, in main)"),
        # An assertion without words of its own.
        (f"{OWN}{ASSERTED}AssertionError\n", "AssertionError: assert len(self.ckpt_list) > 0 (train.py, line 10"),
        (f"{OWN}{ASSERTED}AssertionError: why\n", "AssertionError: why (train.py, line 10"),
        (f"{OWN}AssertionError\n", "AssertionError (train.py, line 10"),
        # What it prints may go to a file; a file of its own is another matter.
        (f"{OWN}{PRINTED}{FULL}\n", f"{FULL}: the disk of its standard output is full (train.py, line 12, in main)"),
        (f"{OWN}{PRINTED.replace('print', 'sys.stdout.write')}{FULL}\n", "the disk of its standard output is full"),
        (f"{OWN}{PRINTED.replace(')', ', file=log)')}{FULL}\n", f"{FULL} (train.py, line 12, in main)"),
        # Of a call over several lines the first is shown: the file may stand on another.
        (f"{OWN}{PRINTED.replace('loss)', '')}{FULL}\n", f"{FULL} (train.py, line 12, in main)"),
        (f"{OWN}{FULL}\n", f"{FULL} (train.py, line 10, in main)"),
        ('  File "/tmp/it/train.py", line 3\n    = 1\n    ^\nSyntaxError: invalid\n', "invalid (train.py, line 3)"),
        # The last of a chain.
        (f"{OWN}OSError: a\n\nDuring it\n\nTraceback (most recent call last):\n{OWN}KeyError: 'b'\n", "KeyError: 'b'"),
        (f"{OWN}it was cut off\n  in the mid", "in the mid"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_an_exception_is_named_with_the_scripts_own_line(tmp_path: Path, errors: str, reason: str, prefix: str) -> None:
    """Frames of Python and of installed packages are not the script's."""
    path = tmp_path / "stderr.log"
    lines = ["loading", "Traceback (most recent call last):", *errors.splitlines()]
    path.write_text("\n".join(prefix + line for line in lines))
    said = last_words(str(path), 1)
    assert reason in said
    assert said.endswith(f"(see {path})")
    assert ("rank3" in said) == (bool(prefix) and "cut off" in errors)


FETCHES = f'  File "{json.__file__}", line 54, in fetch\n    data = dataset[index]\n'
ITEM = '  File "/tmp/it/data.py", line 7, in __getitem__\n    assert row, "no row 20"\n           ^^^\n'
CAUGHT = f"AssertionError: Caught AssertionError in DataLoader worker process 3.\nOriginal {BEGIN}"
REMOTE = f'pool.RemoteTraceback: \n"""\n{BEGIN}'
DIRECT = f'"""\n\nThe above exception was the direct cause of the following exception:\n\n{BEGIN}'
LONG = INSTALLED.replace("return f(x)", "x" * 150) * 60
NOISE = "".join(f"[W {number}] caf\udce9, never mind\n" for number in range(10_000))
PLAIN_GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/tmp/it/train.py", line 10, in main
  |     raise ExceptionGroup("two readers failed", failures)
  | ExceptionGroup: two readers failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | FileNotFoundError: shard-03.tar
    +---------------- 2 ----------------
    | ValueError: bad magic
    +------------------------------------
"""
WARNED = "/tmp/it/train.py:12: UserWarning: old API\n  def f(x): warnings.warn('old API'); return x\n"
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/tmp/it/train.py", line 10, in main
  |     async with TaskGroup() as group:
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/tmp/it/data.py", line 7, in fetch
    |     raise ValueError("no row 20")
    | ValueError: no row 20
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (
            PLAIN_GROUP,
            "ExceptionGroup: two readers failed (2 sub-exceptions): FileNotFoundError: shard-03.tar (train.py",
        ),
        # torch hands on what a DataLoader's worker process raised, and where.
        (
            f"{BEGIN}{OWN}{LIBRARY}{CAUGHT}{FETCHES}{ITEM}AssertionError: no row 20\n\n",
            "AssertionError: no row 20 (in DataLoader worker process 3) (data.py, line 7, in __getitem__)",
        ),
        # There, too, it may be nobody's own line.
        (
            f"{BEGIN}{OWN}{INSTALLED}{CAUGHT}{FETCHES}AssertionError: no row 20\n\n",
            "AssertionError: no row 20 (in DataLoader worker process 3) (train.py, line 10, in main)",
        ),
        (
            f"{BEGIN}{OWN}{CAUGHT}{FETCHES}  cut off",
            "AssertionError: Caught AssertionError in DataLoader worker process",
        ),
        # What a pool's process raised; what was raised because of it is another thing.
        (
            f"{REMOTE}{FETCHES}{ITEM}ValueError: bad\n{DIRECT}{OWN}{LIBRARY}ValueError: bad\n",
            "ValueError: bad (data.py, line 7, in __getitem__)",
        ),
        (
            f"{REMOTE}{FETCHES}{ITEM}ValueError: bad\n{DIRECT}{OWN}{LIBRARY}OSError: worse\n",
            "OSError: worse (train.py, line 10, in main)",
        ),
        (GROUP, "ValueError: no row 20 (data.py, line 7, in fetch)"),
        # Python prints no traceback for a script that it cannot compile.
        (
            '  File "/tmp/it/train.py", line 2\n    print(\n         ^\nSyntaxError: never closed\n',
            "closed (train.py, line 2)",
        ),
        (
            '  File "/tmp/it/train.py", line 2\n    x\nIndentationError: bad\n',
            "IndentationError: bad (train.py, line 2)",
        ),
        # A warning's place is none.
        ('  File "/tmp/it/train.py", line 2\n    x\nDeprecationWarning: old\nthe data is wrong\n', "the data is wrong"),
        # It passed through many layers, each printed with its code; and what was printed before it.
        (f"{BEGIN}{OWN}{LONG}ValueError: deep\nin the model\n", "ValueError: deep (train.py, line 10, in main)"),
        (f"{NOISE}{BEGIN}{OWN}ValueError: boom\n", "ValueError: boom (train.py, line 10, in main)"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_what_another_process_raised_is_named_with_its_own_line(
    tmp_path: Path, errors: str, reason: str, prefix: str
) -> None:
    """And all that is printed in another form than the usual one."""
    path = tmp_path / "stderr.log"
    path.write_text("".join(f"{prefix}{line}\n" for line in errors.splitlines()), errors="surrogateescape")
    said = last_words(str(path), 1)
    assert reason in said
    assert said.endswith(f"(see {path})")


def test_what_a_lost_peer_makes_gloo_and_nccl_say_is_short(tmp_path: Path) -> None:
    """It is the effect of something else, which is told, too."""
    path = tmp_path / "stderr.log"
    nccl = "DistBackendError: NCCL error in: work.cpp:90\nncclRemoteError: A call failed.\nLast error:\nsocket: closed"
    path.write_text(f"Traceback (most recent call last):\n{OWN}torch.distributed.{nccl}\n")
    assert last_words(str(path), 1) == f"it lost a peer (ncclRemoteError) (see {path})"
    gloo = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30646. This is typically caused"
    path.write_text(f"Traceback (most recent call last):\n{OWN}RuntimeError: {gloo} by a crash. Check the logs.\n")
    said = last_words(str(path), 1)
    assert said == f"it lost a peer (Connection closed by peer) (see {path})"
    assert tells_of_a_peer(said)


BARS = "\r  0%|          | 0/100 [00:00<?, ?it/s]\r 10%|█         | 10/100 [00:00<00:02, 44.1it/s, loss=0.1]"
TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: boom\n"


@pytest.mark.parametrize(
    ("errors", "ended", "killed"),
    [
        # What was drawn last is older than the end, whether the bar ended its line or not.
        (f"UserWarning: old\n{BARS}", "UserWarning: old", ""),
        (f"{BARS}\n", "", ""),
        ("Loading:  45%\rLoading:  50%", "", ""),
        ("\x1b[2K\r\x1b[32m12it [00:01, 9.8it/s]\x1b[0m", "", ""),
        # What comes behind it is what ended it, also on the bar's line.
        (f"{BARS}\n{TRACEBACK}", "ValueError: boom", "ValueError: boom"),
        (f"{BARS}{TRACEBACK}{BARS}\n", "ValueError: boom", "ValueError: boom"),
        (f"{BARS}the data is wrong\n", "the data is wrong", ""),
        # No bar: a log's time, an index, the line ends of another system.
        ("[00:01] the data is wrong\r\n", "[00:01] the data is wrong", ""),
        ("RuntimeError: no rows [3, 4]\n", "RuntimeError: no rows [3, 4]", ""),
    ],
)
def test_a_progress_bar_is_no_reason(tmp_path: Path, errors: str, ended: str, killed: str) -> None:
    """Its text has no line of its own, and stays at the end of the errors."""
    path = tmp_path / "stderr.log"
    path.write_text(errors, newline="")
    assert last_words(str(path), 1) == (f"{ended} (see {path})" if ended else f"see {path}")
    assert last_words(str(path), -9) == (f"{killed} (see {path})" if killed else f"see {path}")


@pytest.mark.parametrize("errors", ["no data left\n", "", "[I note] here\n"])
def test_a_warning_is_no_reason(tmp_path: Path, errors: str) -> None:
    path = tmp_path / "stderr.log"
    path.write_text(f"{errors}{WARNED}")
    words = errors.strip()
    assert last_words(str(path), 1) == (f"{words} (see {path})" if words else f"see {path}")


ENFORCED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
    "/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 1000 vs 8. Received data size doesn't match "
    "expected size. Is there a distributed collective mismatch in your code?\n"
)


@pytest.mark.parametrize("behind", ["", "Fatal Python error: Aborted\n\nThread 0x1:\n  File x\n"])
def test_what_gloo_says_of_ranks_in_different_collectives_is_said_for_people(tmp_path: Path, behind: str) -> None:
    """It ends the rank that receives what it does not expect, which need not be the one with the mistake."""
    path = tmp_path / "stderr.log"
    path.write_text(f"step 3\n{ENFORCED}{behind}")
    assert last_words(str(path), -6) == (
        "the ranks were in different collectives, or in one with tensors of other sizes or types (1000 vs 8 bytes):"
        " some did not call what all must call (a backward pass, an evaluation, s.sum, s.gather, s.improved, s.save)"
        f" (see {path})"
    )
    path.write_text(f"{ENFORCED.replace('1000 vs 8', 'Received')}{behind}")
    assert last_words(str(path), -6).startswith(
        "the ranks were in different collectives, or in one with tensors of other sizes or types: some did not"
    )
    path.write_text(f"{ENFORCED.replace('op.preamble.length <= op.nbytes', 'fd != -1')}{behind}")
    assert "collectives" not in last_words(str(path), -6)
