"""The page in a real browser: what it shows, that it fits, and what it does where the master is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")

from dalsegno.master.brain.chronicle import JobEvent, Kind
from dalsegno.master.brain.events import Reply
from dalsegno.master.http.site import Site
from dalsegno.master.server.listener import Listener
from dalsegno.protos import control_pb2 as pb
from tests.support.pages.browser import CHROMIUM, Browser
from tests.unit.master.http.test_http import Small

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: Debian's package is called chromium"),
    pytest.mark.timeout(180),
]
TOKEN = "0123456789abcdef"
LONG = "node-of-a-rather-long-name-as-clusters-give-them-7f9c4d5b8-x2x9p"
PARTS = (("saved", 0.2), ("stopped", 0.1), ("formed", 0.05), ("started", 0.3), ("loaded", 0.2), ("first step", 0.4))


def told(step: int = 240) -> pb.StatusReply:
    """A job that has grown, lost a node, and goes on."""
    reply = pb.StatusReply(job_id="vision", run_id="run-0001", phase=pb.PHASE_RUNNING, epoch=3, step=step, loss=1.25)
    reply.goodput = 0.973
    reply.nodes.add(node="a", role="member", group_rank=0, host="host-a", nproc=8)
    reply.nodes.add(node=LONG, role="member", group_rank=1, host=LONG, nproc=8)
    reply.nodes.add(node="<img src=x>", role="spare", host="host-c", nproc=8, reason="the world has 2 nodes")
    first = reply.history.add(epoch=1, nodes=1, world_size=8, cause="a joined", first_step=1, last_step=100)
    first.paused = 0.0
    for number, (cause, nodes, began, lost) in enumerate(
        (("b joined", 2, 100, 0), (f"{LONG} was lost", 1, 190, 10)), 2
    ):
        epoch = reply.history.add(
            epoch=number, nodes=nodes, world_size=8 * nodes, cause=cause, resumed_step=began, lost_steps=lost
        )
        epoch.first_step, epoch.last_step, epoch.paused = began + 1, began + 100, sum(took for _, took in PARTS)
        for name, took in PARTS:
            epoch.parts.add(name=name, seconds=took)
    for saved in (200, 220):
        record = reply.checkpoints.add(step=saved, bytes=1_500_000_000, best="step-200.e3.1", metric=0.5)
        record.ref.name = f"step-{saved}.e3.1"
    reply.head.CopyFrom(reply.checkpoints[-1])
    return reply


EVENTS = (
    JobEvent(1, "vision has begun", at=1_795_000_000.0, epoch=1),
    JobEvent(2, f"{LONG} was lost (its connection closed)", True, Kind.LOST, at=1_795_000_060.0, epoch=2),
    JobEvent(3, "step-220.e3.1 is committed", kind=Kind.COMMITTED, said=False, at=1_795_000_090.0, epoch=3),
)


class Served:
    """An edge in a thread of its own, around a small master."""

    def __init__(self, token: str | None = TOKEN) -> None:
        self.master = Small(Reply("OK", "", told()))
        self._token = token
        self._ready = threading.Event()

    def __enter__(self) -> Served:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    def do(self, what: object) -> None:
        """Changes the master in its own loop."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (what(), done.set()))  # type: ignore[operator]
        assert done.wait(10)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.master.feed.show(EVENTS)
        edge = Site(self.master, Listener.open("127.0.0.1", 0), self._token, loopback=True)
        edge.start()
        self.url = f"http://{edge.address}/"
        self._ready.set()
        await self._over.wait()
        await edge.close()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Browser]]:
    """One edge and one browser for all tests of this file."""
    with Served() as served, Browser(tmp_path_factory.mktemp("profile"), 1200, 2400) as browser:
        yield served, browser


@pytest.fixture
def shown(opened: tuple[Served, Browser]) -> tuple[Served, Browser]:
    """The page of the job, loaded anew, whatever other tests have done."""
    served, browser = opened
    served.do(lambda: served.master.feed.show(EVENTS))
    served.do(lambda: setattr(served.master, "answer", Reply("OK", "", told())))
    browser.resize(1200, 2400)
    browser.open("about:blank")
    browser.open(f"{served.url}#{TOKEN}")
    browser.until("document.title", lambda title: title == "vision: step 240")
    return served, browser


def text(browser: Browser, of: str) -> str:
    return str(browser.tell(f"document.getElementById('{of}').textContent"))


@pytest.mark.slow
def test_the_page_shows_the_job(shown: tuple[Served, Browser]) -> None:
    """Its name, numbers, nodes, epochs, checkpoints and events; names are text, never markup."""
    _, browser = shown
    assert text(browser, "title") == "Job vision, run-0001"
    assert text(browser, "phase") == "running"
    numbers = text(browser, "numbers")
    for name in ("step240", "loss1.2500", "goodput97.3 %", "lost steps10", "committed220", "workers16"):
        assert name in numbers
    assert "<img src=x>" in text(browser, "nodes")
    assert text(browser, "nodes").endswith("the world has 2 nodes")
    assert browser.tell("document.querySelectorAll('img').length") == 0
    assert "b joined" in text(browser, "history")
    assert "step-220.e3.1" in text(browser, "checkpoints")
    assert "1.5 GB" in text(browser, "checkpoints")
    assert text(browser, "checkpoints").count("best") == 1
    assert "2026-11-18" in text(browser, "events")


@pytest.mark.slow
def test_of_steps_that_nobody_hears_there_is_no_number(shown: tuple[Served, Browser]) -> None:
    """Of a script that tells nothing: no pause of 0 s, no 0 lost steps, no step 0."""
    served, browser = shown
    quiet = told(0)
    quiet.unheard = True
    for epoch in quiet.history:
        epoch.unheard, epoch.resumed_step, epoch.lost_steps, epoch.paused = True, 0, 0, 0.0
    served.do(lambda: setattr(served.master, "answer", Reply("OK", "", quiet)))
    browser.until("document.title", lambda title: title == "vision")
    numbers = text(browser, "numbers")
    for name in ("step-", "paused-", "lost steps-"):
        assert name in numbers
    rows = "[...document.querySelectorAll('#history tr')].slice(1)"
    cells = f"{rows}.map((row) => [...row.cells].slice(4).map((cell) => cell.textContent))"
    assert browser.tell(f"JSON.stringify({cells})") == '[["-","-","-"],["-","-","-"],["-","-","-"]]'
    # Another look, not the same one changed: a look is encoded once.
    heard = pb.StatusReply()
    heard.CopyFrom(quiet)
    heard.history[2].unheard = False
    heard.history[2].paused = 1.5
    served.do(lambda: setattr(served.master, "answer", Reply("OK", "", heard)))
    browser.until("document.getElementById('numbers').textContent", lambda shown: "paused1.5 s" in shown)


@pytest.mark.slow
def test_the_pictures_have_axes_and_legends(shown: tuple[Served, Browser]) -> None:
    """Each part of each change is drawn, as long as it took; changes are marked in the curve."""
    served, browser = shown

    def further() -> None:
        for step in range(100, 250, 10):
            served.master.answer = Reply("OK", "", told(step))

    served.do(further)
    boxes = browser.tell("[...document.querySelectorAll('#pauses rect')].map((box) => +box.getAttribute('width'))")
    assert len(boxes) == 2 * len(PARTS)
    for width, (_, took) in zip(boxes, PARTS, strict=False):
        assert width / boxes[0] == pytest.approx(took / PARTS[0][1], rel=0.02)
    assert [name for name, _ in PARTS] == browser.tell(
        "[...document.querySelectorAll('#pauses-legend li')].map((item) => item.textContent)"
    )
    for picture, names in (("loss", ("step", "loss")), ("worlds", ("step", "nodes")), ("pauses", ("seconds",))):
        said = text(browser, picture)
        assert all(name in said for name in names), said
        assert browser.tell(f"document.querySelectorAll('#{picture} text').length") >= 4
    assert browser.tell("document.querySelectorAll('#worlds .lost').length") == 1
    assert "steps done again" in text(browser, "worlds-legend")


@pytest.mark.slow
@pytest.mark.parametrize("width", [480, 320, 1600])
def test_the_page_fits(shown: tuple[Served, Browser], width: int, tmp_path: Path) -> None:
    """Nothing makes the page itself wider than the window; wide tables scroll by themselves."""
    _, browser = shown
    browser.resize(width, 2400)
    browser.until("innerWidth", lambda inner: inner == width)
    assert browser.until("document.documentElement.scrollWidth", lambda wide: wide <= width)
    # The pictures are drawn anew, so that their letters keep their size.
    browser.until("document.getElementById('loss').viewBox.baseVal.width", lambda wide: wide <= width)
    outside = """[...document.querySelectorAll('svg text')].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.left < -1 || box.right > innerWidth + 1;
    }).map((one) => one.textContent)"""
    browser.picture(tmp_path / f"page-{width}.png")
    assert browser.tell(outside) == []


@pytest.mark.slow
def test_warnings_can_be_seen_alone(shown: tuple[Served, Browser]) -> None:
    """New events come by themselves; the box leaves the warnings."""
    served, browser = shown
    more = JobEvent(4, "a late warning", True, at=1_795_000_200.0, epoch=3)
    served.do(lambda: served.master.feed.show((*EVENTS, more)))
    browser.until("document.getElementById('events').textContent", lambda said: "a late warning" in said)
    assert "is committed" in text(browser, "events")
    browser.tell("document.getElementById('warnings').click()")
    assert "is committed" not in text(browser, "events")
    assert text(browser, "events").count("lost") >= 1
    browser.tell("document.getElementById('warnings').click()")


@pytest.mark.slow
def test_a_master_that_is_away_is_said_to_be(shown: tuple[Served, Browser]) -> None:
    """What was known stays; with the master it goes on."""
    served, browser = shown
    served.do(lambda: setattr(served.master, "answer", Reply("UNAVAILABLE", "stopping", None)))
    browser.until("document.getElementById('reason').textContent", lambda said: "the master answers 503" in said)
    assert text(browser, "title") == "Job vision, run-0001"
    served.do(lambda: setattr(served.master, "answer", Reply("OK", "", told(250))))
    browser.until("document.title", lambda title: title == "vision: step 250")


@pytest.mark.full
def test_a_master_that_can_record_nothing_says_so_on_the_page(shown: tuple[Served, Browser]) -> None:
    """All else looks well then."""
    served, browser = shown
    troubled = told(250)
    troubled.store_trouble = "cannot write the store in etcd: it is full"
    served.do(lambda: setattr(served.master, "answer", Reply("OK", "", troubled)))
    browser.until("document.getElementById('reason').textContent", lambda said: "etcd: it is full" in said)
    assert browser.tell("document.getElementById('reason').className") == "bad"
    served.do(lambda: setattr(served.master, "answer", Reply("OK", "", told(260))))
    browser.until("document.getElementById('reason').textContent", lambda said: "record" not in said)


@pytest.mark.full
def test_the_page_bears_all_remarks_that_are_kept(shown: tuple[Served, Browser]) -> None:
    """A thousand events, and three hundred long lines of nodes: they are there, and the page answers."""
    served, browser = shown
    many = [JobEvent(number, f"event {number}", at=1_795_000_000.0 + number, epoch=3) for number in range(1, 1001)]
    lines = [
        JobEvent(number, f"n-{number}: <b>no</b> {'x' * 400}", bool(number % 2), at=1_795_001_000.0 + number, epoch=3)
        for number in range(1001, 1301)
    ]
    served.do(lambda: served.master.feed.show((*many, *lines)))
    browser.until("document.getElementById('events').textContent", lambda said: "n-1300: <b>no</b>" in said)
    browser.resize(480, 2400)
    assert browser.tell("document.documentElement.scrollWidth") <= 480
    began = time.monotonic()
    browser.tell("document.getElementById('warnings').click()")
    assert "n-1300" not in text(browser, "events")
    assert "n-1299" in text(browser, "events")
    browser.tell("document.getElementById('warnings').click()")
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_without_the_token_the_page_says_what_to_do(shown: tuple[Served, Browser]) -> None:
    """And nothing of the job is seen."""
    served, browser = shown
    browser.open("about:blank")
    browser.open(served.url)
    browser.until("document.getElementById('reason')?.textContent", lambda said: said and "wants its token" in said)
    assert "vision" not in browser.tell("document.body.innerText")
