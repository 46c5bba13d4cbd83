"""Settings beside a script's data: what it cannot load that without is part of the checkpoint, and nothing else is."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.storage import adoption, beside, taking
from dalsegno.agent.storage.naming import is_setting
from dalsegno.elastic.checkpoint import Manifest, verify
from tests.unit.agent.storage.test_save_dir import Run, runs, save

__all__ = ["runs"]

Runs = Callable[..., Run]


def names(manifest: Manifest) -> list[str]:
    return [one.path for one in manifest.files]


def put(path: Path, text: str = "{}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def speechbrains(out: Path, minute: int) -> str:
    """As its Checkpointer saves: the settings come first, and their directory counts only with them."""
    place = f"save/CKPT+2026-05-01+12-{minute}-00+00"
    put(out / place / "CKPT.yaml", f"end-of-epoch: true\nunixtime: {minute}\n")
    for name in ("model", "optimizer"):
        save(out / place / f"{name}.ckpt", of=minute)
    put(out / place / "counter.ckpt", "3")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("${resume_dir}",), ()], ids=["is told where", "finds a copy"])
def test_speechbrains_checkpoint_is_found_again(runs: Runs, flags: tuple[str, ...]) -> None:
    """It began anew at each change, and what it saved then took the place of what the run had."""
    run = runs(*flags)
    place = speechbrains(run.directory / "e1", 10)
    run.next()
    sealed = run.sealed()
    assert f"{place}/CKPT.yaml" in names(sealed)
    told = run.next()
    found = Path(told[-1]) if flags else run.out / place
    assert found == (run.directory / sealed.name / place if flags else found)
    assert {one.name for one in found.iterdir()} == {"CKPT.yaml", "model.ckpt", "optimizer.ckpt", "counter.ckpt"}
    run.quiet()
    run.taken.close()


@pytest.mark.slow
def test_settings_of_other_numbers_and_places_are_left(runs: Runs) -> None:
    """nanochat's files of a step; `from_pretrained`'s; and not what a script logs, or has beside them."""
    run = runs()
    out = run.directory / "e1"
    for number in ("000050", "000100"):
        put(out / "d4" / f"meta_{number}.json")
        save(out / "d4" / f"model_{number}.pt")
    for name in ("config.json", "tokenizer.json", "modeling_own.py"):
        put(out / "last" / name)
    put(out / "last" / "vocab.txt", "word\n" * 2000)
    save(out / "last" / "model.bin")
    for other in ("last/train.log", "last/log.txt", "last/.cache.json", "last/events.jsonl", "data/a.json", "b.json"):
        put(out / other, "line\n" * 2000)
    run.next()
    ours = ["d4/meta_000100.json", "d4/model_000100.pt"]
    theirs = [f"last/{name}" for name in ("config.json", "model.bin", "modeling_own.py", "tokenizer.json", "vocab.txt")]
    sealed = run.sealed()
    assert names(sealed) == [*ours, *theirs]
    verify(run.directory / sealed.name, sealed)
    put(run.out / "last" / "config.json", "[1, 2]")
    run.quiet()
    save(run.out / "last" / "model.bin", w=1)
    again = run.sealed()
    assert (run.directory / again.name / "last" / "config.json").read_text(encoding="ascii") == "[1, 2]"
    run.taken.close()


@pytest.mark.slow
def test_settings_of_older_saves_do_not_count(runs: Runs) -> None:
    """nanochat never deletes its `meta_*.json`: behind the 64th there was none in any checkpoint."""
    run = runs()
    out = run.directory / "e1"
    for number in range(beside._MOST_FILES + 1):
        put(out / f"meta_{number:06d}.json")
        put(out / f"metrics_epoch_{number + 1000}.json")
    save(out / "model_000063.pt")
    save(out / "model_000064.pt")
    put(out / "config.json")
    run.next()
    assert names(run.sealed()) == ["config.json", "meta_000064.json", "model_000064.pt"]
    put(run.out / "meta_000065.json")
    save(run.out / "model_000065.pt")
    assert names(run.sealed()) == ["config.json", "meta_000065.json", "model_000065.pt"]
    run.taken.close()


@pytest.mark.slow
def test_settings_of_files_written_in_turn_are_taken(runs: Runs) -> None:
    """Their numbers do not count, and are the files' all the same."""
    run = runs()
    run.next()
    for number, slot in enumerate((0, 1, 0, 1)):
        put(run.out / f"meta_{slot}.json", str(number))
        save(run.out / f"ckpt_{slot}.pt", step=number)
        sealed = run.sealed()
        assert names(sealed) == [f"ckpt_{slot}.pt", f"meta_{slot}.json"]
        assert (run.directory / sealed.name / f"meta_{slot}.json").read_text(encoding="ascii") == str(number)
    run.taken.close()


@pytest.mark.slow
def test_a_data_set_beside_the_checkpoint_is_none_of_its_settings(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files, or large ones: each commit would copy them. The smallest come first."""
    monkeypatch.setattr(beside, "_MOST_BYTES", 3000)
    run = runs()
    out = run.directory / "e1"
    for number in range(beside._MOST_FILES + 1):
        put(out / "many" / f"dog{number}.json")
    save(out / "many" / "ckpt.pt")
    for place, size in (("large", 3001), ("together", 1601)):
        put(out / place / "train.json", "x" * size)
        put(out / place / "test.json", "x" * 1600)
        save(out / place / "ckpt.pt")
    run.next()
    together = ["together/ckpt.pt", "together/test.json"]
    assert names(run.sealed()) == ["large/ckpt.pt", "large/test.json", "many/ckpt.pt", *together]
    run.taken.close()


@pytest.mark.slow
def test_one_that_is_written_all_the_time_is_left_and_holds_nothing_up(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no checkpoint would ever be the run's."""
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.5)
    run = runs()
    run.next()
    over = threading.Event()

    def write() -> None:
        for number in itertools.count():
            put(run.out / "history.json", json.dumps([*range(number)]))
            if over.wait(0.001):
                return

    put(run.out / "config.json")
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for step in (1, 2):
            save(run.out / "ckpt.pt", step=step)
            assert names(run.sealed()) == ["ckpt.pt", "config.json"]
    finally:
        over.set()
        writer.join()
    run.taken.close()


@pytest.mark.parametrize("how", ["changes", "is gone", "cannot be read"])
def test_one_that_changes_while_it_is_copied_is_left_out(runs: Runs, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The rest of the checkpoint is taken at once."""
    plain = taking.copy_file

    def disturbed(source: Path, target: Path) -> None:
        if source.name == "history.json":
            if how == "cannot be read":
                raise PermissionError(13, "Permission denied")
            put(source, "[]") if how == "changes" else source.unlink()
        plain(source, target)

    monkeypatch.setattr(taking, "copy_file", disturbed)
    run = runs()
    for name in ("config", "history", "MANIFEST"):
        put(run.directory / "e1" / f"{name}.json")
    save(run.directory / "e1" / "ckpt.pt", step=1)
    run.next()
    sealed = run.sealed()
    assert names(sealed) == ["ckpt.pt", "config.json"]
    verify(run.directory / sealed.name, sealed)
    assert sorted(os.listdir(run.directory / sealed.name)) == ["MANIFEST.json", "ckpt.pt", "config.json"]
    run.taken.close()


def test_who_names_what_is_a_checkpoint_gets_just_that(runs: Runs) -> None:
    run = runs(pattern="*.pt")
    put(run.directory / "e1" / "config.json")
    save(run.directory / "e1" / "ckpt.pt", step=1)
    run.next()
    assert names(run.sealed()) == ["ckpt.pt"]
    run.taken.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.json", True),
        ("CKPT.yaml", True),
        ("model.safetensors.index.json", True),
        ("__init__.py", True),
        ("meta_000100.json", True),
        ("merges.txt", True),
        ("log.txt", False),
        ("train_log.json", False),
        (".hidden.json", False),
        ("metrics.jsonl", False),
        ("config.json.tmp", False),
        ("odd\udcff.json", False),
        ("model.pt", False),
    ],
)
def test_which_are_settings(name: str, expected: bool) -> None:
    assert is_setting(name) is expected
