"""A tensor's values as bytes; who looks at a tensor leaves it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dalsegno.elastic.data.prints import print_of
from dalsegno.elastic.rank.tensor_bytes import bytes_of
from dalsegno.elastic.saving.bundles import Bundle
from dalsegno.elastic.training import held_state
from dalsegno.elastic.training.digest import digests
from dalsegno.elastic.training.sources import fingerprint
from dalsegno.elastic.training.unlisted import Unlisted


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.tensor([1, 2], dtype=torch.int16), b"\1\0\2\0"),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t(), b"\1\3\2\4"),
        (torch.tensor(1.0, dtype=torch.bfloat16), b"\x80\x3f"),
        (nn.Parameter(torch.zeros(1)), b"\0\0\0\0"),
        (torch.zeros(0, 3), b""),
        (torch.tensor([True, False]), b"\1\0"),
        (torch.tensor([1 - 2j]).conj(), b"\0\0\x80\x3f\0\0\0\x40"),
        (torch._neg_view(torch.tensor([-1.0])), b"\0\0\x80\x3f"),  # type: ignore[attr-defined]
    ],
)
def test_bytes_come_one_behind_the_other(tensor: Tensor, wanted: bytes) -> None:
    assert bytes(bytes_of(tensor)) == wanted


def _unlisted(tensor: Tensor) -> None:
    module = nn.Module()
    module.counts = tensor
    Unlisted(module)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "bytes_of": bytes_of,
    "digests": lambda tensor: digests([tensor]),
    "held": held_state._bytes,
    "fingerprint": fingerprint,
    "print_of": print_of,
    "pieces": lambda tensor: list(Bundle({"values": tensor}).pieces()),
    "unlisted": _unlisted,
}


@pytest.mark.parametrize("name", LOOKS)
def test_who_looks_at_a_tensor_lets_others_resize_its_storage(name: str) -> None:
    """FSDP frees gathered parameters in this way: the next save failed."""
    tensor = torch.arange(6)
    LOOKS[name](tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
