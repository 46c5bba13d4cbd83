"""Scripts of transformers that run ahead: their TrainingArguments are made before there is a place in a world."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.script import modules_of
from tests.support.jobs.ports import free_port

from .test_run_ahead import PLACE, Ahead, Make, make, waits

__all__ = ["make"]

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="nothing runs ahead on Python 3.10"),
]

ARGUMENTS = """
import copy, dataclasses, os, pickle, torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.logging import get_logger
from transformers import AutoModelForCausalLM, TrainingArguments
from dalsegno.protos import ahead
args = TrainingArguments(output_dir="out", use_cpu=True, report_to="none", ddp_backend="gloo")
print("made", ahead.running() is not None, flush=True)
{use}
print(dist.is_initialized(), args.process_index, args.world_size, args.device, args.n_gpu, ahead.running())
put_back = ["__post_init__", "device", "distributed_state", "_n_gpu", "__reduce_ex__"]
print([name for name in put_back if "standby" in str(getattr(getattr(TrainingArguments, name, 0), "__module__", ""))])
print(type(PartialState().distributed_type).__name__, TrainingArguments(output_dir="out", use_cpu=True).device)
"""
ASKED = {
    "the device": ("args.device", "the device of its TrainingArguments"),
    "the rank": ("args.process_index", "distributed_state of its TrainingArguments"),
    "the size": ("args.world_size", "distributed_state of its TrainingArguments"),
    "cards": ("args.n_gpu", "_n_gpu of its TrainingArguments"),
    "a group": ("print(dist.is_initialized())", "its group"),
    "a rank of it": ("print(dist.get_rank())", "its group"),
    "accelerate": ("print(PartialState().num_processes)", "its PartialState"),
    "a logger": ("get_logger('x').warning('careful')", "a logger of accelerate"),
    "a message that nobody sees": ("get_logger('x').debug('so far')", "its group"),
    "a copy": ("args = copy.deepcopy(args)", "a copy of its TrainingArguments"),
    "a shallow copy": ("args = copy.copy(args)", "a copy of its TrainingArguments"),
    "others": ("args = dataclasses.replace(args, seed=3)", "its group"),
    "a variable": ("print(os.environ['RANK'])", "RANK"),
    "a file": ("open('effect', 'w')", "it writes effect"),
    "other threads": ("torch.set_num_threads(1); print(dist.is_initialized(), torch.get_num_threads())", "its group"),
    "another backend": ("args.ddp_backend = 'none'; print(dist.get_backend())", "its group"),
    "another interface": ("os.environ['GLOO_SOCKET_IFNAME'] = 'none0'; print(dist.is_initialized())", "its group"),
    "warnings": ("import warnings; warnings.simplefilter('error'); print(dist.is_initialized())", "its group"),
    "a model": (
        "AutoModelForCausalLM.from_pretrained('model'); print('read', ahead.running() is not None)",
        "its group",
    ),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("trainer")
    one = Ahead(directory, modules=modules_below(directory))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(directory / "model")
    yield one
    one.close()


def place_alone() -> dict[str, str]:
    """In a world of one rank, with a port for its store."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**PLACE, "RANK": "0", "WORLD_SIZE": "1", **store}


def modules_below(directory: Path) -> tuple[str, ...]:
    """What is imported before a script of transformers runs."""
    script = directory / "named.py"
    script.write_text("import transformers")
    return modules_of(script)


@pytest.mark.parametrize(
    "asks", [pytest.param(asks, marks=[] if asks in ("a group", "a model") else pytest.mark.full) for asks in ASKED]
)
def test_training_arguments_are_made_ahead(trainer: Ahead, caplog: pytest.LogCaptureFixture, asks: str) -> None:
    """Whoever asks for something that depends on the place finds what would have been there, and Python as it was."""
    pytest.importorskip("transformers")
    caplog.set_level(logging.INFO)
    text, reason = ASKED[asks]
    trainer.clear()
    trainer.run(ARGUMENTS.format(use=text))
    assert waits(caplog) == [reason]
    lines = trainer.finish(place_alone()).splitlines()
    said = {
        "a group": ["True"],
        "a rank of it": ["0"],
        "accelerate": ["1"],
        "a variable": ["0"],
        "other threads": ["True 1"],
        "another backend": ["gloo"],
        "another interface": ["True"],
        "warnings": ["True"],
        "a model": ["read True"],
    }
    assert lines == [
        "made True",
        *said.get(asks, []),
        "True 0 1 cpu:0 0 None",
        "[]",
        "DistributedType cpu:0",
    ]


LESS_FAR = {
    "a thread that asks": "import threading\nt = threading.Thread(target=dist.is_initialized)\nt.start(); t.join()",
    "an error": "if args.__dict__.get('_n_gpu') is None: raise RuntimeError('where is it?')",
    "much output": "print('x' * (2 << 20))",
}


@pytest.mark.full
@pytest.mark.parametrize("how", LESS_FAR)
def test_a_script_that_fails_for_it_runs_less_far(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path, how: str
) -> None:
    """It waits where its arguments are made, as any other, and that at each start from then on."""
    pytest.importorskip("transformers")
    caplog.set_level(logging.INFO)
    ahead = make(modules=modules_below(tmp_path))
    ahead.run(ARGUMENTS.format(use=LESS_FAR[how]))
    if how == "much output":  # which is seen only as the place comes
        assert waits(caplog) == ["its output is read"]
        assert ahead.place(place_alone()).wait(60) != 0
        ahead.run(ARGUMENTS.format(use=LESS_FAR[how]))
    assert sum("runs less far ahead from now on" in line for line in caplog.messages) == 1
    for _ in range(2):
        assert waits(caplog)[-1] in ("RANK", "WORLD_SIZE")
        lines = ahead.finish(place_alone()).splitlines()
        assert lines[0] == "made False"
        assert lines[-3:] == ["True 0 1 cpu:0 0 None", "[]", "DistributedType cpu:0"]
        ahead.run(ARGUMENTS.format(use=LESS_FAR[how]))


OWN_DEVICE = """
from transformers import TrainingArguments
class Own(TrainingArguments):
    @property
    def device(self):
        found = super().device
        found.type
        return found
print(Own(output_dir="out", use_cpu=True, report_to="none").device.type)
"""


@pytest.mark.full
def test_a_device_of_a_class_of_its_own_is_known_at_once(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Such arguments may use it as they are made."""
    pytest.importorskip("transformers")
    caplog.set_level(logging.INFO)
    ahead = make(modules=modules_below(tmp_path))
    ahead.run(OWN_DEVICE)
    assert len(waits(caplog)) == 1
    assert ahead.finish(place_alone()).splitlines() == ["cpu"]
