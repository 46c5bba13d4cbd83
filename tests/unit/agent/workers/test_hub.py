"""Which hub counts as out of reach, and which workers are told so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from dalsegno.agent.script import Script, asks_hub
from dalsegno.agent.standby import hooks, hub_offline
from dalsegno.agent.storage import hub_note
from dalsegno.agent.storage.hub_note import HubNote
from dalsegno.agent.workers import hub as knowledge
from dalsegno.agent.workers.hub import HubKnowledge, answers
from dalsegno.protos.contract import Variable
from tests.support.jobs.ports import free_port
from tests.support.jobs.silent_hub import SilentHub

ASKS = "from transformers import AutoModel\n"


@pytest.fixture
def silent() -> Iterator[SilentHub]:
    hub = SilentHub()
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


class _Refuses(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def forbidding() -> Iterator[str]:
    """A hub that lets nobody in."""
    server = HTTPServer(("127.0.0.1", 0), _Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def script(directory: Path, text: str = ASKS) -> Script:
    path = directory / "train.py"
    path.write_text(text)
    return Script(sys.executable, ("-u", str(path)))


def until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_silence_and_refused_connections_are_no_answer(silent: SilentHub) -> None:
    """A name that nobody knows is none, either."""
    assert not answers(silent.url, 0.2)
    assert not answers(f"http://127.0.0.1:{free_port()}")
    assert not answers("http://nobody.invalid")


@pytest.mark.slow
def test_whoever_answers_is_there(forbidding: str) -> None:
    """Also with an error, or with what is no TLS; and so is one that cannot be asked at all."""
    assert answers(forbidding)
    assert answers(forbidding.replace("http:", "https:"))
    assert answers("strange://nobody")


class Asking:
    """The threads that ask a hub since this was made: one that another test has left is none of them."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def __bool__(self) -> bool:
        return any(thread.name == "hub" for thread in set(threading.enumerate()) - self._before)


@pytest.fixture
def asking() -> Asking:
    return Asking()


def begins_to_answer(port: int, said: list[str], asking: Asking) -> None:
    """Until that is said: then nobody asks any more."""
    server = HTTPServer(("127.0.0.1", port), _Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    until(lambda: len(said) > 1 and not asking)
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_workers_are_told_after_the_first_world_and_until_it_answers(tmp_path: Path, asking: Asking) -> None:
    """One line for each; the first world of a run asks as ever."""
    said: list[str] = []
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {"HF_ENDPOINT": f"{url}/"}
    # What it asks is taken, and not answered before this is closed: until then nobody can know.
    with socket.create_server(("127.0.0.1", port)):
        hub = HubKnowledge(script(tmp_path), lambda text, _: said.append(text), environment, (0.01, 0.01))
        assert hub.variables(2) == {}, "not known yet"
    until(lambda: said)
    assert hub.variables(1) == {}
    assert hub.variables(2) == {Variable.HUB_UNREACHABLE: url}
    assert f"{url} does not answer" in said[0]
    begins_to_answer(port, said, asking)
    assert "answers again" in said[1]
    assert hub.variables(3) == {}


def test_a_node_that_joins_knows_before_its_workers_start(tmp_path: Path, asking: Asking) -> None:
    """It asks as soon as its agent does anything, so its first world, which is not the run's, need not wait."""
    said: list[str] = []
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    hub = HubKnowledge(script(tmp_path), lambda text, _: said.append(text), {"HF_ENDPOINT": url}, (0.01, 0.01))
    hub.begin()
    hub.begin()
    until(lambda: said)
    assert hub.variables(2) == {Variable.HUB_UNREACHABLE: url}
    begins_to_answer(port, said, asking)
    assert len(said) == 2, "it was asked by one thread"


def node(tmp_path: Path, url: str, said: list[str]) -> HubKnowledge:
    """One of several of a job."""
    private = tmp_path / "private"
    private.mkdir(exist_ok=True)
    own = script(tmp_path)
    return HubKnowledge(own, lambda text, _: said.append(text), {"HF_ENDPOINT": url}, (0.01, 0.01), private)


def test_a_newcomer_takes_the_word_of_the_others_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent hub would hold it up twice for as long as an answer may take. It asks all the same, for less."""
    asked: list[float] = []
    there = threading.Event()

    def answers(_: str, seconds: float) -> bool:
        asked.append(seconds)
        return there.is_set()

    monkeypatch.setattr(knowledge, "answers", answers)
    first: list[str] = []
    node(tmp_path, "http://hub", first).begin()
    until(lambda: first)
    assert set(asked) == {knowledge.ANSWER_SECONDS}
    second: list[str] = []
    newcomer = node(tmp_path, "http://hub", second)
    assert newcomer.variables(2) == {Variable.HUB_UNREACHABLE: "http://hub"}
    until(lambda: second)
    assert asked.count(knowledge.ANSWER_SOON_SECONDS) == 1
    there.set()
    until(lambda: "hub" not in {thread.name for thread in threading.enumerate()})
    assert newcomer.variables(3) == {}
    assert "answers again" in first[1]
    assert "answers again" in second[1]
    assert not HubNote(tmp_path / "private", "http://hub").is_fresh()


def test_a_newcomer_of_the_first_seconds_takes_their_word_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asking: Asking
) -> None:
    """It began to ask before anybody knew, and its own question is still out when its workers start."""
    answered = threading.Event()
    monkeypatch.setattr(knowledge, "answers", lambda _url, _seconds: answered.wait(30))
    newcomer = node(tmp_path, "http://hub", [])
    newcomer.begin()
    assert newcomer.variables(2) == {}, "nobody knows"
    note = HubNote(tmp_path / "private", "http://hub")
    note.write()
    assert newcomer.variables(1) == {}
    assert newcomer.variables(2) == {Variable.HUB_UNREACHABLE: "http://hub"}
    answered.set()
    until(lambda: not asking)
    assert newcomer.variables(3) == {}, "it has found itself that the hub is there"
    assert note.is_fresh()


@pytest.mark.slow
def test_a_newcomer_that_reaches_the_hub_asks_it(tmp_path: Path, forbidding: str) -> None:
    """The others' network may be another one; they keep what they have found."""
    (tmp_path / "private").mkdir()
    note = HubNote(tmp_path / "private", forbidding)
    note.write()
    said: list[str] = []
    newcomer = node(tmp_path, forbidding, said)
    newcomer.begin()
    until(lambda: not newcomer.variables(2))
    assert said == []
    assert note.is_fresh()


def test_a_word_counts_for_some_minutes_and_for_one_hub(tmp_path: Path) -> None:
    """By the clock of the file system. Nothing of it is left behind."""
    note = HubNote(tmp_path, "http://a")
    assert not note.is_fresh()
    note.write()
    assert note.is_fresh()
    assert not HubNote(tmp_path, "http://b").is_fresh()
    old = time.time() - 2 * hub_note.FRESH_SECONDS
    os.utime(tmp_path / "hub", (old, old))
    assert not note.is_fresh()
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]
    note.remove()
    note.remove()
    assert [*tmp_path.iterdir()] == []
    away = HubNote(tmp_path / "away", "http://a")
    away.write()
    assert not away.is_fresh()


def test_a_fresh_interpreter_is_told_too(tmp_path: Path) -> None:
    """A worker that no standby process becomes: the hook is installed before its script imports anything."""
    assert hooks.wanted({Variable.HUB_UNREACHABLE: "http://hub"}) == ("dalsegno.agent.standby.hub_offline",)
    constants = tmp_path / "huggingface_hub"
    constants.mkdir()
    (constants / "__init__.py").write_text("")
    (constants / "constants.py").write_text("ENDPOINT, HF_HUB_OFFLINE = 'http://hub', False\n")
    (tmp_path / "train.py").write_text("import huggingface_hub.constants as found\nprint(found.HF_HUB_OFFLINE)\n")
    arguments = hooks.arguments_for(("-u", str(tmp_path / "train.py")))
    environment = {key: value for key, value in os.environ.items() if key != hub_offline.OFFLINE}
    environment |= {Variable.HUB_UNREACHABLE: "http://hub", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        (ASKS, {"HF_HUB_OFFLINE": "0"}),
        (ASKS, {"TRANSFORMERS_OFFLINE": "1"}),
        (f"import os\nos.environ['HF_ENDPOINT'] = 'http://mirror'\n{ASKS}", {}),
        ("import torch\n", {}),
    ],
)
def test_nobody_is_asked_where_people_have_decided_or_nothing_asks(
    tmp_path: Path, silent: SilentHub, asking: Asking, text: str, environment: dict[str, str]
) -> None:
    """Nothing leaves this machine for a script that has nothing to do with a hub."""
    environment = {"HF_ENDPOINT": silent.url, **environment}
    assert HubKnowledge(script(tmp_path, text), print, environment, (0.01, 0.01)).variables(2) == {}
    assert not asking
    assert silent.asked == []


def test_modules_of_ones_own_ask_for_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that they import, and those of a script that is run as a module; but not where one of them decides."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("from datasets import load_dataset\n")
    (tmp_path / "model.py").write_text("from mine.data import load_dataset\n")
    (package / "__main__.py").write_text("import model\n")
    one = script(tmp_path, "import model\n")
    assert asks_hub(one)
    monkeypatch.chdir(tmp_path)
    assert asks_hub(Script(sys.executable, ("-u", "-m", "mine")))
    (tmp_path / "model.py").write_text("import os\nos.environ['HF_HUB_OFFLINE'] = '1'\nfrom mine.data import x\n")
    assert not asks_hub(one)
    (tmp_path / "model.py").write_text("import torch\n")
    assert not asks_hub(one)


def test_a_package_of_the_users_asks_for_nothing_by_its_name(tmp_path: Path) -> None:
    """A `datasets` beside the script is no library, and what it imports counts."""
    one = script(tmp_path, "from datasets import Mine\n")
    assert asks_hub(one)
    (tmp_path / "datasets.py").write_text("class Mine: pass\n")
    assert not asks_hub(one)
    (tmp_path / "datasets.py").write_text("import timm\n")
    assert asks_hub(one)


def test_ms_swifts_modules_ask(tmp_path: Path) -> None:
    """They have no text of the user's."""
    for name in ("swift.cli.sft", "dalsegno.swift_plugin.sft"):
        assert asks_hub(Script(sys.executable, ("-u", "-m", name)))
    assert not asks_hub(Script(sys.executable, ("-u", "-m", "mine")))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the library has read when it was imported."""
    module = ModuleType("huggingface_hub.constants")
    module.ENDPOINT, module.HF_HUB_OFFLINE = "http://hub", False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(hub_offline.OFFLINE, raising=False)
    return module


def offline(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("DALSEGNO_TEST", "restores the environment")
    hub_offline.install({Variable.HUB_UNREACHABLE: "http://hub"})
    return bool(library.HF_HUB_OFFLINE)


def test_a_library_that_is_imported_already_asks_nobody(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a standby worker."""
    with monkeypatch.context() as patch:
        patch.setenv(hub_offline.OFFLINE, "")
        patch.delenv(hub_offline.OFFLINE)
        assert offline(library, patch)
    monkeypatch.delenv(hub_offline.OFFLINE, raising=False)


def test_a_script_of_another_hub_or_mind_is_left_alone(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has set HF_ENDPOINT or HF_HUB_OFFLINE before it imported the library."""
    library.ENDPOINT = "http://mirror"  # type: ignore[attr-defined]
    assert not offline(library, monkeypatch)
    library.ENDPOINT = "http://hub"  # type: ignore[attr-defined]
    monkeypatch.setenv(hub_offline.OFFLINE, "0")
    assert not offline(library, monkeypatch)
