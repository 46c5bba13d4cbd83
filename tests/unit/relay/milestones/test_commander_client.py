"""How the Commander is spoken to, and what is said where it does not answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.relay.milestones.access import Access
from dalsegno.relay.milestones.commander_client import Away, CommanderClient, Milestone

# Nobody listens on port 9 (discard) here.
URL, PROXY = "http://127.0.0.1:9", "http://ann:pa55w0rd@127.0.0.1:9"


@pytest.mark.parametrize(
    ("exceptions", "proxied"), [("", True), ("other.example", True), ("127.0.0.1", False), ("*", False)]
)
def test_a_proxy_on_the_way_is_named(monkeypatch: pytest.MonkeyPatch, exceptions: str, proxied: bool) -> None:
    """An environment has one for all of the internet, and it refuses what is near; its password stays here."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, PROXY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, exceptions)
    with pytest.raises(Away, match=f"no answer from {URL}: ") as away:
        CommanderClient(URL, "my-run", Access("")).run()
    said = "asked through the proxy 127.0.0.1:9: name the host in no_proxy to reach it directly"
    assert (said in str(away.value), "pa55w0rd" in str(away.value)) == (proxied, False)


def test_the_proxy_is_the_environments_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of an earlier client, in a process where they were others."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    urllib.request.install_opener(direct)  # the one that is kept from then on
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        asks = threading.Thread(target=lambda: suppressed(CommanderClient(URL, "my-run", Access(""))))
        asks.start()
        proxy.settimeout(20)
        with proxy.accept()[0] as asked:
            assert asked.recv(100).startswith(f"GET {URL}/".encode())
        asks.join()


@pytest.mark.parametrize(
    ("status", "answer", "counts"),
    [
        (200, {"status": "ok"}, True),
        (409, {"detail": "never committed"}, False),
        (409, {}, None),
        (500, {"detail": "the master failed"}, None),
        (503, {"detail": "not now"}, None),
    ],
)
def test_what_never_counts_is_the_commanders_word(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: dict[str, str], counts: bool | None
) -> None:
    """A failure, or what a proxy answers, is none: it is told again."""
    client = CommanderClient(URL, "my-run", Access(""))
    monkeypatch.setattr(client, "_ask", lambda *_: (status, answer))
    told = Milestone("me/tune", "abc", 40, "step-40.e1.0", "digest")
    if counts is None:
        with pytest.raises(Away, match=f"answers {status}"):
            client.tell(told)
    else:
        assert client.tell(told) is counts


def suppressed(client: CommanderClient) -> None:
    with contextlib.suppress(Away):
        client.run()
