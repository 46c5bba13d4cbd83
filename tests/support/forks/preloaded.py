"""What processes of tests would import first; imported once by the process that they are forked from (`forked`)."""

import contextlib
import gc
import importlib

import deepspeed
import deepspeed.ops
import numpy
import torch
import torch._dynamo
import torch.distributed

import dalsegno.agent.commands.dlrover_run
import dalsegno.agent.standby.nursery
import dalsegno.elastic.data.batches
import dalsegno.elastic.deepspeed.engine
import dalsegno.elastic.script.session
import dalsegno.elastic.training.accumulation
import dalsegno.elastic.training.training_state
from dalsegno.agent.control.grpc_logs import quiet_grpc

# What DeepSpeed's engine imports late, and a second of it; not every version has them.
for late in ("deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer"):
    with contextlib.suppress(ImportError):
        importlib.import_module(late)

# As the console script imports it: gRPC reads how much it is to say only once.
with quiet_grpc():
    import dalsegno.agent.commands.launch
    import dalsegno.master.cli

# Each rank would ask a compiler what it can build, with all of setuptools.
OPERATIONS = deepspeed.ops.__compatible_ops__

__all__ = ["OPERATIONS", "dalsegno", "deepspeed", "numpy", "torch"]

# The collector writes to every object it looks at, and what is written to is no longer shared with the forked.
gc.collect()
gc.freeze()
