"""What people may import, package by package: no more, no less, and each name is there."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import dalsegno.elastic as elastic

SURFACES = {
    "elastic": {
        *("EXIT_BAD_CHECKPOINT", "EXIT_DRAINED", "Accumulation", "BadResumePoint", "Batch", "BatchPlan"),
        *("Batches", "Boundary", "Callback", "CheckpointStore", "Counts", "DDP", "DeepSpeed", "Drained"),
        *("EarlyStopping", "ElasticSampler", "Evaluator", "FSDP", "MicroBatch", "Order", "Position", "ResumePoint"),
        *("SaveError", "Session", "Strategy", "Tracked", "Trainer", "TrainingState", "background"),
        *("sample_generator", "session"),
    },
    "elastic.checkpoint": {
        *("FORMS", "MANIFEST", "SHARDED", "UNIVERSAL", "WEIGHTS", "Best", "CheckpointDamaged", "CheckpointName"),
        *("CheckpointStore", "Cut", "Damage", "DirectoryInUse", "FileEntry", "Inventory", "LocalLock", "Manifest"),
        *(
            "Order",
            "Position",
            "Reads",
            "Ref",
            "Retirement",
            "SavedAs",
            "Shape",
            "Tracked",
            "Unsealed",
            "describe",
        ),
        *("inspect", "inventory", "is_checkpoint_name", "lineage", "read_sealed", "retirable", "seal", "verify"),
        *("verify_files", "verify_listing"),
    },
    "elastic.deepspeed": {
        *("config", "load_weights", "loads_by_values", "prepare", "restore", "restore_weights", "save"),
        *("saved_by_trainer", "strategy"),
    },
    "elastic.universal": {
        *("EXIT_ENVIRONMENT", "EXIT_IMPOSSIBLE", "EXIT_READY", "EXIT_SOURCE_BAD", "ConversionError", "Effort"),
        *("EnvironmentFailed", "Impossible", "SourceBad", "Watch", "Wish", "convert", "convert_directory"),
        *("is_read", "is_written"),
    },
    "swift_plugin": {"PLUGIN"},
    "swift_plugin.hf": {"elastic", "prepare", "under_dlrover_run"},
}


@pytest.mark.parametrize("package", SURFACES)
def test_a_package_offers_this(package: str) -> None:
    """A name that comes or goes is a decision."""
    module = importlib.import_module(f"dalsegno.{package}")
    assert set(module.__all__) == SURFACES[package]
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.full
@pytest.mark.slow
def test_the_session_is_a_function_whatever_was_imported() -> None:
    """A package or module of that name would take its place as soon as somebody imports it."""
    code = (
        "import pkgutil, importlib, dalsegno.elastic as e\n"
        "names = [m.name for m in pkgutil.iter_modules(e.__path__)]\n"
        "for name in set(e.__all__) & set(names): raise SystemExit(name)\n"
        "import dalsegno.elastic.training.session\n"
        "assert callable(e.session) and e.session.__name__ == 'session'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not (Path(str(elastic.__file__)).parent / "session").exists()


def test_a_name_that_is_not_there_says_so() -> None:
    """The lazy package is no black hole."""
    with pytest.raises(AttributeError):
        _ = elastic.no_such_name
