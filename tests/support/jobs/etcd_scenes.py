"""Masters and agents over an etcd to which something happens: it is full, refuses, or loses its disk."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import grpc

with contextlib.suppress(ImportError):  # who uses them asks for aetcd first
    from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from tests.support.jobs.etcd_members import Members
from tests.support.jobs.light import Crew
from tests.support.jobs.master_process import command, settings


@contextlib.contextmanager
def master(store: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A master's process, killed in the end."""
    line = command(store, *flags)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def served(process: subprocess.Popen[str]) -> str:
    """The address at which a master leads, once it does."""
    assert process.stdout is not None
    for line in process.stdout:
        if "generation" in (said := json.loads(line)):
            return str(said["address"])
    raise AssertionError("it has ended")


@contextlib.contextmanager
def crew(*addresses: str) -> Iterator[Crew]:
    """Two agents, not in a world yet, that commit once they are."""
    made = Crew("job", addresses, settings((2, 4), grow_interval=0.1))
    try:
        for name in "ab":
            made.start(name)
        made.train(0.1)
        yield made
    finally:
        made.close()


def filled(members: Members, size: int) -> None:
    """Fills etcd until it refuses: nothing more is written, by whoever."""
    with grpc.insecure_channel(members.endpoints[0]) as channel:
        stub = rpc_pb2_grpc.KVStub(channel)
        for number in range(1000):
            try:
                stub.Put(rpc_pb2.PutRequest(key=b"rubbish", value=bytes([number % 250]) * size), timeout=10)
            except grpc.RpcError as error:
                if "space exceeded" not in str(error):
                    raise
                return
    raise AssertionError("etcd has room without end")


def emptied(members: Members) -> None:
    """Makes room, as an operator does: compact, defragment, disarm the alarm."""
    with grpc.insecure_channel(members.endpoints[0]) as channel:
        stub, care = rpc_pb2_grpc.KVStub(channel), rpc_pb2_grpc.MaintenanceStub(channel)
        now = stub.DeleteRange(rpc_pb2.DeleteRangeRequest(key=b"rubbish"), timeout=10).header.revision
        stub.Compact(rpc_pb2.CompactionRequest(revision=now, physical=True), timeout=10)
        care.Defragment(rpc_pb2.DefragmentRequest(), timeout=30)
        for one in care.Alarm(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET), timeout=10).alarms:
            off = rpc_pb2.AlarmRequest(
                action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=one.memberID, alarm=rpc_pb2.NOSPACE
            )
            care.Alarm(off, timeout=10)


def asked_by_command(what: str, *addresses: str) -> subprocess.CompletedProcess[str]:
    """What a person hears who types `dalsegno WHAT`."""
    line = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", what, f"--master={','.join(addresses)}"]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
