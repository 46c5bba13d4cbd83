"""A worker for the tests of cards: runs trainings one after the other, each with a session of its own.

``--cases`` is a JSON list; ``--out`` gets one ``result-<rank>.json``. Where a case names no device, the product chooses
it: this rank's card where there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dalsegno.elastic import Callback, Evaluator, Trainer
from dalsegno.elastic.trainer.deepspeed_strategy import DeepSpeed
from dalsegno.elastic.trainer.fsdp import FSDP
from dalsegno.elastic.trainer.strategies import DDP, Strategy
from tests.support.workers import cases
from tests.support.workers.trainer_worker import GLOBAL_BATCH, LENGTH, MICRO, Block, Model, Points, make_optimizer

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_strategy(case: Mapping[str, Any]) -> Strategy:
    """Masters are fp32 in any case: FSDP's and DeepSpeed's own, with DDP the weights themselves."""
    name, precision = case["strategy"], case["precision"]
    if name.startswith("zero"):
        # Deterministic torch fills the buckets, which are of gigabytes otherwise.
        zero = {"stage": int(name[-1]), "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
        config: dict[str, Any] = {"zero_optimization": zero}
        if precision != "fp32":
            config[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
        return DeepSpeed(config)
    if name == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=TYPES[precision], reduce_dtype=torch.float32)
        options: dict[str, Any] = {} if precision == "fp32" else {"mp_policy": policy}
        return FSDP(blocks=(Block,), **options)
    return DDP()


class Notes(Callback):
    """Writes down every loss as it is, and where it was computed."""

    def __init__(self) -> None:
        self.losses: dict[int, str] = {}

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self.losses[trainer.step] = float(values["loss"]).hex()


def loss_of(case: Mapping[str, Any]) -> Any:
    dtype = TYPES[case["precision"]]
    cast = case["strategy"] == "ddp" and dtype is not torch.float32

    def loss(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        inputs, wanted = data
        if case["strategy"].startswith("zero"):
            inputs = inputs.to(dtype)
        with torch.autocast(inputs.device.type, dtype if cast else torch.bfloat16, enabled=cast):
            output = model(inputs)
        error: Tensor = output.float() - wanted
        return error.square().mean()

    return loss


def digest_of(model: nn.Module) -> str:
    """Of all values of this rank's part of a model."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(name.encode() + local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cuda_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def train(case: dict[str, Any]) -> dict[str, Any]:
    """One training, with dropout unless the case says otherwise: the losses bit by bit, and what is left of it."""
    torch.manual_seed(5)
    model, notes = Model(case.get("dropout", 0.1)), Notes()
    kind = case.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    scaled = case["precision"] == "fp16" and not case["strategy"].startswith("zero")
    trainer = Trainer(
        model,
        Points(LENGTH),
        optimizer=make_optimizer,
        loss=loss_of(case),
        global_batch_size=GLOBAL_BATCH,
        max_micro_batch_size=MICRO,
        max_steps=case["steps"],
        strategy=make_strategy(case),
        max_grad_norm=0.5,
        grad_scaler=torch.amp.GradScaler(kind, init_scale=256.0, growth_interval=2) if scaled else None,
        seed=3,
        checkpoint_dir=case["directory"],
        save_every=case.get("save_every", 0),
        save_in_background=not case["strategy"].startswith("zero"),
        loader_options={"num_workers": 1, "pin_memory": kind == "cuda"} if case.get("loaders") else None,
        evaluator=Evaluator(
            Points(5, first=1000), lambda model, data: {"loss": (loss_of(case)(model, data), 1)}, batch_size=2
        ),
        evaluate_every=2,
        callbacks=[notes],
        log_every=1,
        progress=False,
        device=case.get("device"),
    )
    before = cuda_started()
    trainer.fit()
    device = next(iter(model.parameters())).device
    return {
        "losses": notes.losses,
        "model": digest_of(model),
        "device": str(device),
        "current": torch.cuda.current_device() if device.type == "cuda" else None,
        "started cuda": cuda_started() and not before,
        "pid": os.getpid(),
        "backend": dist.get_backend_config() if dist.is_initialized() else "",
        "evaluated": trainer.metrics["loss"].hex(),
    }


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--cases", type=json.loads, required=True)
    flags.add_argument("--out", type=Path, required=True)
    arguments = flags.parse_args()
    torch.use_deterministic_algorithms(True)
    results = []
    for case in arguments.cases:
        cases.begin(case["port"])
        results.append(train(case))
    cases.end(results, arguments.out)


if __name__ == "__main__":
    main()
