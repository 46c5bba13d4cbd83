"""The manifest's own checksum: what was changed after it was written is refused, whatever it says now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from dalsegno.agent.commands import dalsegno
from dalsegno.elastic.checkpoint import (
    Best,
    CheckpointDamaged,
    CheckpointName,
    Cut,
    Damage,
    Manifest,
    Order,
    Ref,
    Shape,
    inventory,
    read_sealed,
    seal,
)
from dalsegno.elastic.universal.conversion import seal_form
from tests.unit.elastic.checkpoint.test_checkpoint import manifest_for

RECORDED = Path(__file__).parents[2] / "recorded" / "manifest_1.json"


def of_version_1(run_dir: Path) -> Path:
    """A checkpoint that a program of before sealed; its directory."""
    directory = run_dir / "step-8.e2.1"
    directory.mkdir()
    (directory / "model.pt").write_bytes(b"weights")
    (directory / "MANIFEST.json").write_bytes(RECORDED.read_bytes())
    return directory


CUT = Cut(True, False, 4, True, -5, (("sample 0", "1 abc 0.5,1"), ("sample 9", "1 def")))


def full(directory: Path) -> Manifest:
    """A manifest that has all there is, sealed."""
    directory.mkdir()
    (directory / "model.pt").write_bytes(b"weights")
    best = Best("step-2.e1.1", "loss", "min", 0.25)
    order = Order(7, 1000, 16, True, 2)
    shape, cut = Shape(2, "deepspeed-zero-2", False, True), CUT
    manifest = manifest_for(directory, best=best, keep=3, order=order, shape=shape, cut=cut)
    seal(directory, manifest)
    return manifest


@pytest.mark.slow
def test_no_flipped_bit_of_a_manifest_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them, one after the other; one bit of every 16th byte also by way of `verify`."""
    directory = tmp_path / "step-4.e2.1"
    manifest = full(directory)
    path = directory / "MANIFEST.json"
    whole = path.read_bytes()
    assert read_sealed(directory, manifest.digest) == manifest
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            with pytest.raises(ValueError, match=r"checksum|JSON|version|canonical|keys"):
                Manifest.from_bytes(bytes(flipped))
        if position % 16:
            continue
        path.write_bytes(bytes(flipped))
        with pytest.raises(CheckpointDamaged) as caught:
            Manifest.read(directory)
        assert caught.value.reason is Damage.MANIFEST
        assert dalsegno.run(["checkpoints", "verify", str(directory)]) == 1
        assert "intact" not in capsys.readouterr().out
    path.write_bytes(whole)
    assert dalsegno.run(["checkpoints", "verify", str(directory)]) == 0


def test_the_checksum_is_that_of_all_before_it(tmp_path: Path) -> None:
    """So anybody can check it, and it says what is wrong; two manifests of other content have another one."""
    manifest = full(tmp_path / "step-4.e2.1")
    data = manifest.to_bytes()
    content = json.loads(data)
    assert list(content)[-1] == "checksum"
    assert list(content)[:-1] == sorted(set(content) - {"checksum"})
    assert content["version"] == 2
    changed = data.replace(b'"step":4', b'"step":5').replace(b"step-4.e2.1", b"step-5.e2.1")
    with pytest.raises(ValueError, match="checksum is not that of its content"):
        Manifest.from_bytes(changed)
    without = data[: data.rindex(b',"checksum"')] + b"}\n"
    with pytest.raises(ValueError, match="canonical"):
        Manifest.from_bytes(without)


def test_a_manifest_of_version_1_reads_as_it_was_written(tmp_path: Path) -> None:
    """They are in people's directories: same digest, same content; nothing of it passes for version 2 or has a sum."""
    directory = of_version_1(tmp_path)
    digest = "a037d32b5ef5cc50d3c68393c10db5a84defd394ce8c026de127c0e79343fae4"
    manifest = read_sealed(directory, digest)
    assert manifest.to_bytes() == RECORDED.read_bytes()
    assert (manifest.version, manifest.step, manifest.files[0].size) == (1, 8, 7)
    assert dalsegno.run(["checkpoints", "verify", str(directory)]) == 0
    assert inventory(tmp_path) == [manifest]
    with pytest.raises(ValueError, match="canonical"):
        Manifest.from_bytes(RECORDED.read_bytes().replace(b'"version":1}', b'"version":2}'))
    with pytest.raises(ValueError, match="version 3, this program reads 1 to 2"):
        replace(manifest, version=3)
    summed = replace(manifest, version=2).to_bytes()
    assert summed.startswith(RECORDED.read_bytes()[:-4])
    tail = summed[summed.rindex(b',"checksum"') :]
    with pytest.raises(ValueError, match=r"checksum|canonical"):
        Manifest.from_bytes(RECORDED.read_bytes()[:-2] + tail)


def test_a_cut_is_written_where_there_is_one_and_read_strictly(tmp_path: Path) -> None:
    """A manifest without it is what it was before, byte for byte; one that says nonsense of it is refused."""
    manifest = full(tmp_path / "step-4.e2.1")
    assert Manifest.from_bytes(manifest.to_bytes()).cut == CUT
    without = replace(manifest, cut=replace(CUT, samples=()))
    assert b"samples" not in without.to_bytes().partition(b'"cut"')[2].partition(b"}")[0]
    assert Manifest.from_bytes(without.to_bytes()) == without
    assert b'"cut"' not in replace(manifest, cut=None).to_bytes()
    by_world = replace(manifest, cut=Cut(False, True))
    assert Manifest.from_bytes(by_world.to_bytes()) == by_world
    for was, now in (
        (b'"seed":-5', b'"seed":0.5'),
        (b'"micro_batch_size":4', b'"micro_batch_size":-4'),
        (b'"pad"', b'"p"'),
        (b'["sample 0","1 abc 0.5,1"]', b'["sample 0"]'),
        (b'["sample 0","1 abc 0.5,1"]', b'["sample 0",1]'),
    ):
        changed = manifest.to_bytes().replace(was, now)
        body = changed[: changed.rindex(b',"checksum"')]
        with pytest.raises(
            ValueError, match=r"seed is not|not a count|cut has keys|not a list of pairs|print of a sample is not"
        ):
            Manifest.from_bytes(body + b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')


def test_a_form_of_an_old_checkpoint_has_a_checksum(tmp_path: Path) -> None:
    """What is written now is of the present version, whatever it was made from."""
    source = Manifest.read(of_version_1(tmp_path))
    target = tmp_path / str(CheckpointName.parse(source.name).later("universal", 3))
    target.mkdir()
    form = seal_form(source, target, ())
    assert Manifest.read(target) == form
    assert (form.version, form.source) == (2, Ref(source.name, source.digest))
    assert b'"checksum"' in (target / "MANIFEST.json").read_bytes()
