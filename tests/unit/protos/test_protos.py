"""The wire format: generated code matches the .proto files, and field numbers and types never change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from dalsegno.protos import control_pb2, worker_pb2
from tests.support.pages.sources import ROOT

GOLDEN = Path(__file__).with_name("proto_fields.txt")
TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def _message_lines(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = TYPES[field.type]
        if field.message_type is not None:
            kind += f" {field.message_type.full_name}"
        if field.enum_type is not None:
            kind += f" {field.enum_type.full_name}"
        label = "repeated " if field.is_repeated else ""
        if field.containing_oneof is not None:
            label = f"oneof {field.containing_oneof.name} "
        yield f"{message.full_name} {field.number} {field.name} {label}{kind}"
    for nested in message.nested_types:
        yield from _message_lines(nested)


def wire_lines(*files: FileDescriptor) -> list[str]:
    """One line for each field, enum value and RPC: all that two versions must agree on."""
    lines: list[str] = []
    for file in files:
        for message in file.message_types_by_name.values():
            lines += _message_lines(message)
        for enum in file.enum_types_by_name.values():
            lines += [f"{enum.full_name} {value.number} {value.name}" for value in enum.values]
        for service in file.services_by_name.values():
            for method in service.methods:
                stream = "stream " if method.server_streaming else ""
                line = f"{service.full_name} {method.name} {method.input_type.full_name}"
                lines.append(f"{line} -> {stream}{method.output_type.full_name}")
    return sorted(lines)


def present() -> list[str]:
    return wire_lines(control_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR)


def test_wire_format_is_frozen() -> None:
    """What was once on the wire keeps its number, name and type."""
    golden = GOLDEN.read_text().splitlines()
    gone = sorted(set(golden) - set(present()))
    assert gone == [], "changed or removed: an older agent or master would misread the newer one"
    new = sorted(set(present()) - set(golden))
    assert new == [], f"new: record it by `{sys.executable} -m tests.unit.protos.test_protos` in the checkout"


def test_a_changed_number_is_seen() -> None:
    """The freeze can fail: each recorded line holds number, name and type."""
    number = "dalsegno.control.v1.Caller 4 epoch uint64"
    assert number in present()
    assert number.replace(" 4 ", " 9 ") not in present()


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    """The committed code is what the pinned generators make of the .proto files."""
    tools = os.environ.get("DALSEGNO_PROTO_PYTHON", str(ROOT / "build" / "venv-protos" / "bin" / "python"))
    if not Path(tools).exists():
        if "DALSEGNO_PROTO_PYTHON" in os.environ:
            pytest.fail(f"{tools} doesn't exist")
        pytest.skip("no generators here: `make tools` installs them")
    subprocess.run(
        ["bash", str(ROOT / "protos" / "generate.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": tools},
        check=True,
        timeout=120,
    )
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").glob("*_pb2*")}
    assert sorted(made) == sorted(committed)
    for name, text in made.items():
        assert text == committed[name], f"protos/{name} is stale: run `make protos`"


def record() -> None:
    """Adds what is new to the golden file; refuses when something recorded is gone."""
    old = set(GOLDEN.read_text().splitlines()) if GOLDEN.exists() else set()
    gone = sorted(old - set(present()))
    if gone:
        sys.exit("error: these were changed or removed, restore them in the .proto files:\n" + "\n".join(gone))
    GOLDEN.write_text("\n".join(present()) + "\n")


if __name__ == "__main__":
    record()
