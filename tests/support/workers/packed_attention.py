"""For ms-swift's ``--external_plugins`` in tests: attention over packs on a CPU, where flash attention's would be.

ms-swift packs only for flash attention. Here plain attention stands under its name: each position sees those before it
in its own sample, which begins where the position is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """``query``, ``key``, ``value`` of (batch, heads, length, width); the result is (batch, length, heads, width)."""
    assert attention_mask is None
    sample = (position_ids == 0).cumsum(-1)
    earlier = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    seen = (sample[:, :, None] == sample[:, None, :]) & earlier
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen[:, None], dropout_p=dropout, scale=scaling
    )
    return found.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", attend)
PreTrainedModel._check_and_adjust_attn_implementation = lambda self, name, *_, **__: name
