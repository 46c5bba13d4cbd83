"""What processes of tests would import first; imported once by the process that they are forked from (`forked`)."""

import gc

import deepspeed
import numpy
import torch
import torch._dynamo
import torch.distributed

import dalsegno.agent.cli
import dalsegno.agent.launch
import dalsegno.agent.standby
import dalsegno.elastic.deepspeed
import dalsegno.elastic.sessions

__all__ = ["dalsegno", "deepspeed", "numpy", "torch"]

# The collector writes to every object it looks at, and what is written to is no longer shared with the forked.
gc.collect()
gc.freeze()
