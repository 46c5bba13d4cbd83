"""As `preloaded`, and what a Trainer of Hugging Face imports."""

import gc

import accelerate
import datasets
import peft
import transformers.trainer

import dalsegno.swift_plugin.hf.trainer

from . import preloaded

__all__ = ["accelerate", "dalsegno", "datasets", "peft", "preloaded", "transformers"]

gc.collect()
gc.freeze()
