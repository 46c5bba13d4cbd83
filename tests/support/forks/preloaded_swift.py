"""As `preloaded_hf`, and ms-swift, which changes a few things in transformers when it is imported."""

import gc

import swift.pipelines.train.sft
import swift.trainers.seq2seq_trainer

import dalsegno.swift_plugin.swift_hooks

from . import preloaded_hf

__all__ = ["dalsegno", "preloaded_hf", "swift"]

gc.collect()
gc.freeze()
