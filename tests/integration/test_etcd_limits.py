"""An etcd that refuses: it has users, or is full; and one that answers slowly while a master takes the record over."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("aetcd")

from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from dalsegno.master.leadership.leader_key import LeaderKey
from dalsegno.master.leadership.standing import KeyOrder, Leader
from dalsegno.master.record.etcd_calls import Etcd, EtcdFiles
from dalsegno.master.record.store import open_store
from tests.support.jobs.certificates import Authority, Certificate
from tests.support.jobs.etcd_members import ETCD, MISSING, etcd_members
from tests.support.jobs.etcd_scenes import crew, emptied, filled, master, served
from tests.support.jobs.master_process import asked_status, eventually, said_by
from tests.support.jobs.ports import free_port
from tests.support.jobs.proxy import Proxy

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(ETCD is None, reason=MISSING)]


@pytest.mark.full
def test_etcd_is_full(tmp_path: Path) -> None:
    """One line says so and what helps; nobody is declared dead; what waited is recorded once there is room."""
    log = tmp_path / "log"
    with (
        etcd_members(tmp_path / "etcd", flags=[f"--quota-backend-bytes={4 << 20}"]) as members,
        master(members.url, f"--log-file={log}") as process,
        crew(said_by(process)["address"]) as agents,
    ):
        a = agents.agents["a"]
        eventually(lambda: len(a.promised) > 2, 20)
        epoch = a.epoch
        filled(members, 300_000)
        eventually(lambda: "etcd is full" in log.read_text(), 20)
        before = len(a.promised)
        time.sleep(4)  # why: longer than the leader's lease
        assert len(a.promised) <= before + 1
        lines = [line for line in log.read_text().splitlines() if "cannot write the store in etcd" in line]
        assert len(lines) == 1, lines
        assert "compact and defragment it or raise its quota" in lines[0]
        emptied(members)
        eventually(lambda: len(a.promised) > before + 2, 20)
        assert {(one.epoch, len(one.incarnations)) for one in agents.agents.values()} == {(epoch, 1)}
        agents.start("c")
        eventually(lambda: a.nodes == 3, 20)


@pytest.mark.full
def test_etcd_goes_back_under_a_job(tmp_path: Path) -> None:
    """An old copy is put in its place while a master leads: nothing that was promised is forgotten, nobody is lost."""
    log, port = tmp_path / "log", free_port()
    with (
        etcd_members(tmp_path / "etcd", unread="it forgets") as members,
        master(members.url, f"--log-file={log}", f"--port={port}") as process,
        crew(served(process)) as agents,
    ):
        a = agents.agents["a"]
        eventually(lambda: len(a.promised) > 2, 20)
        with members.put_back(0):
            agents.start("c")
            eventually(lambda: a.nodes == 3 and len(a.promised) > 10, 30)
        epoch, before = a.epoch, len(a.promised)
        eventually(lambda: len(a.promised) > before + 3, 30)
        assert "the record in etcd has gone back" in log.read_text()
        process.kill()
        process.wait()
        promised = max(step for _, step in a.promised)
        with master(members.url, f"--port={port}") as second:
            with grpc.insecure_channel(served(second)) as channel:
                status = asked_status(channel, "job")
            assert (status.epoch, status.head.step >= promised) == (epoch, True)
            eventually(lambda: max(step for _, step in a.promised) > promised, 30)
            assert {(one.epoch, len(one.incarnations)) for one in agents.agents.values()} == {(epoch, 1)}


def call(channel: grpc.Channel, method: str, **fields: Any) -> None:
    """One of etcd's calls about users."""
    name = "AuthEnable" if method == "Enable" else method
    getattr(rpc_pb2_grpc.AuthStub(channel), name)(getattr(rpc_pb2, f"Auth{method}Request")(**fields), timeout=10)


class Guarded:
    """An etcd of one member that lets in only who has a certificate."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.endpoint, self.peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.start("ca")

    def start(self, authority: str) -> None:
        """With certificates of a new authority."""
        made = Authority(self.directory / authority)
        self.ca = made.path
        self.server, self.root, self.user = (made.issue(name) for name in ("server", "root", "dalsegno"))
        peer = f"http://{self.peer}"
        line = [str(ETCD), "--data-dir", str(self.directory / "data"), "--log-level", "error", "--name", "one"]
        line += ["--listen-client-urls", f"https://{self.endpoint}", "--advertise-client-urls"]
        line += [f"https://{self.endpoint}", "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        line += ["--initial-cluster", f"one={peer}", "--client-cert-auth", "--trusted-ca-file", str(self.ca)]
        line += ["--cert-file", str(self.server.path), "--key-file", str(self.server.key)]
        self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def flags(self, certificate: Certificate) -> Sequence[str]:
        """A master's."""
        return (f"--etcd-ca={self.ca}", f"--etcd-cert={certificate.path}", f"--etcd-key={certificate.key}")

    def channel(self) -> grpc.Channel:
        """The administrator's."""
        pieces = (self.ca, self.root.key, self.root.path)
        return grpc.secure_channel(
            self.endpoint, grpc.ssl_channel_credentials(*(piece.read_bytes() for piece in pieces))
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.full
def test_etcd_has_users(tmp_path: Path) -> None:
    """The certificate's name is the user; without rights one line says so, and the master goes on once it has them."""
    etcd = Guarded(tmp_path)
    try:
        with etcd.channel() as channel:
            grpc.channel_ready_future(channel).result(30)
            call(channel, "UserAdd", name="root", options={"no_password": True})
            call(channel, "RoleAdd", name="root")
            call(channel, "UserGrantRole", user="root", role="root")
            call(channel, "UserAdd", name="dalsegno", options={"no_password": True})
            call(channel, "RoleAdd", name="masters")
            call(channel, "UserGrantRole", user="dalsegno", role="masters")
            call(channel, "Enable")
            url = f"etcd://{etcd.endpoint}"
            with master(url, *etcd.flags(etcd.user)) as process:
                assert process.stderr is not None
                line = process.stderr.readline()
                assert "permission denied (grant the user's role read and write on the keys under /dalsegno/)" in line
                assert line.endswith("; waiting for it\n")
                right = {"key": b"/dalsegno/", "range_end": b"/dalsegno0", "permType": 2}
                call(channel, "RoleGrantPermission", name="masters", perm=right)
                with crew(said_by(process)["address"]) as agents:
                    a = agents.agents["a"]
                    eventually(lambda: len(a.promised) > 2, 20)
                    call(channel, "RoleRevokePermission", role="masters", key=b"/dalsegno/", range_end=b"/dalsegno0")
                    assert "permission denied (grant" in process.stderr.readline()
                    time.sleep(4)  # why: longer than the leader's lease
                    before, epoch = len(a.promised), a.epoch
                    call(channel, "RoleGrantPermission", name="masters", perm=right)
                    eventually(lambda: len(a.promised) > before + 2, 30)
                    # Nobody was declared dead.
                    assert {(one.epoch, len(one.incarnations)) for one in agents.agents.values()} == {(epoch, 1)}
    finally:
        etcd.close()


@pytest.mark.full
def test_certificates_for_etcd_are_renewed(tmp_path: Path) -> None:
    """All of them, with another authority: whoever leads and whoever stands by takes the new files by itself."""
    etcd = Guarded(tmp_path)
    mounted = tmp_path / "mounted"
    mounted.mkdir()

    def mount() -> None:
        for piece, name in ((etcd.ca, "ca"), (etcd.user.path, "cert"), (etcd.user.key, "key")):
            # As a secret in Kubernetes comes: at once.
            shutil.copy(piece, mounted / "new")
            (mounted / "new").replace(mounted / name)

    try:
        mount()
        flags = [f"--etcd-{name}={mounted / name}" for name in ("ca", "cert", "key")]
        url = f"etcd://{etcd.endpoint}"
        with master(url, *flags) as first, master(url, *flags) as second:
            addresses = [said_by(one)["address"] for one in (first, second)]
            with crew(*addresses) as agents:
                a = agents.agents["a"]
                eventually(lambda: len(a.promised) > 2, 20)
                epoch = a.epoch
                etcd.close()
                etcd.start("ca-2")
                mount()
                before = len(a.promised)
                eventually(lambda: len(a.promised) > before + 2, 30)
                # The other one leads with its new certificate, too.
                client = Etcd([etcd.endpoint], EtcdFiles(*(mounted / name for name in ("ca", "cert", "key"))))
                found = client.get("/dalsegno/job/leader")
                client.close()
                assert found is not None
                leads = addresses.index(json.loads(found.data)["address"])
                (first, second)[leads].send_signal(signal.SIGTERM)
                before = len(a.promised)
                eventually(lambda: len(a.promised) > before + 2, 30)
                assert {(one.epoch, len(one.incarnations)) for one in agents.agents.values()} == {(epoch, 1)}
    finally:
        etcd.close()


def test_a_user_is_missing(tmp_path: Path) -> None:
    """Etcd asks who calls, over a plain connection: one line names the flags, and a password in the URL is refused."""
    with etcd_members(tmp_path / "etcd", unread="it lets in nobody without a certificate") as members:
        with grpc.insecure_channel(members.endpoints[0]) as channel:
            call(channel, "UserAdd", name="root", password="secret")
            call(channel, "RoleAdd", name="root")
            call(channel, "UserGrantRole", user="root", role="root")
            call(channel, "Enable")
        with master(members.url) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "give a certificate with the user's name as its CN (--etcd-ca, --etcd-cert, --etcd-key)" in line
        with master(members.url.replace("etcd://", "etcd://root:secret@")) as process:
            assert process.wait(20) == 2
            assert process.stderr is not None
            said = process.stderr.read()
            assert "use certificates" in said
            assert "secret" not in said


@pytest.mark.full
def test_a_master_is_told_to_stop_while_it_takes_the_record_over(tmp_path: Path) -> None:
    """Each of many reads is slow, and it ends within the time of one."""
    with etcd_members(tmp_path / "etcd") as members:
        way = Proxy(members.endpoints[0])
        key = LeaderKey(Etcd(members.endpoints, EtcdFiles()), "job")
        me = Leader("somebody", "127.0.0.1:1", 1)
        key.carry_out(KeyOrder.CAMPAIGN, me)
        with master(f"etcd://{way.address}", f"--log-file={tmp_path / 'log'}") as process:
            said_by(process)
            # Somebody leads, and writes rows for all chunks.
            store = open_store(members.url, "job")
            store.save({f"row-{number}": b"x" for number in range(500)}, store.raise_generation())
            store.close()
            way.delay(0.3)
            key.carry_out(KeyOrder.RESIGN, me)
            etcd = Etcd(members.endpoints, EtcdFiles())

            def leads() -> bool:
                found = etcd.get("/dalsegno/job/leader")
                return found is not None and json.loads(found.data)["master"] != "somebody"

            eventually(leads, 20)
            time.sleep(1)  # why: by then it reads chunks, some at once, 0.3 s or more each time
            assert "leading, generation" not in (tmp_path / "log").read_text()
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert time.monotonic() - began < 8
            etcd.close()
        key.close()
        way.close()
