"""Our own processes import nothing from the working directory, where a user may have modules of any name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.protos.own_program import command_of

pytestmark = pytest.mark.timeout(60)

STRANGER = "raise SystemExit('a stranger was imported')\n"
ROOMS = ("agent", "elastic", "master", "protos", "relay")


@pytest.mark.parametrize("name", ["queue.py", "logging.py", "types.py", "random.py", "json.py", "torch.py", "dalsegno"])
@pytest.mark.parametrize("module", ["master", "elastic.universal", "agent.commands.dalsegno"])
def test_a_program_of_ours_takes_nothing_from_the_working_directory(tmp_path: Path, module: str, name: str) -> None:
    """Nor is anything missing there: a folder `dalsegno` is what a clone of the repository makes."""
    if name == "dalsegno":
        for room in ROOMS:
            (tmp_path / name / room).mkdir(parents=True)
            (tmp_path / name / room / "__init__.py").write_text(STRANGER)
    else:
        (tmp_path / name).write_text(STRANGER)
    line = [*command_of(f"dalsegno.{module}"), "--help"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("flags", [(), pytest.param(("-P",), marks=pytest.mark.skipif("sys.version_info < (3, 11)"))])
def test_a_module_runs_as_with_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    """With its own name in front of its arguments, as `__main__`, and with the same path but for its first entry."""
    text = "import sys\nprint(__name__, __spec__.name, sys.modules['__main__'].__file__, sys.argv, sys.path)\n"
    (tmp_path / "shown.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = [
        subprocess.run([*words, "a", "--b"], cwd="/", capture_output=True, text=True, check=True, timeout=30).stdout
        for words in (command_of("shown", flags), (sys.executable, *flags, "-m", "shown"))
    ]
    assert said[0] == said[1].replace("['/', ", "[")


def test_the_saver_of_flash_checkpoint_finds_the_scripts_modules_after_its_own(tmp_path: Path) -> None:
    """A storage class may be one of them; nothing that the saver itself needs is."""
    for name in ("json", "signal", "threading", "dalsegno/agent/__init__", "dalsegno/protos/__init__"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(STRANGER)
    (tmp_path / "dlrover.py").write_text("raise ImportError('of the script')\n")
    line = [*command_of("dalsegno.agent.dlrover.companion"), str(tmp_path)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, input="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "its saver cannot be loaded: ImportError: of the script" in done.stdout
