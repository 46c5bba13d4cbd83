"""What transformers' own collators draw, as a Trainer gives them to `Batches`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.data.looking import Inspected, look_at_collate

transformers = pytest.importorskip("transformers")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(20))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    return transformers.BertTokenizer(str(tmp_path / "vocab.txt"))


@pytest.mark.parametrize(
    ("kind", "options", "seen"),
    [
        ("DataCollatorForLanguageModeling", {"mlm": True, "seed": 5}, Inspected(collate_own=True)),
        ("DataCollatorForLanguageModeling", {"mlm": True}, Inspected(collate_draws=True)),
        ("DataCollatorForLanguageModeling", {"mlm": False}, Inspected()),
        ("DataCollatorWithPadding", {}, Inspected()),
    ],
)
def test_a_collator_of_transformers(tokenizer: Any, kind: str, options: dict[str, Any], seen: Inspected) -> None:
    """Also within the one that removes columns; the generator that it makes is made anew by the training."""
    collate = getattr(transformers, kind)(tokenizer, **options)
    wrapped = transformers.trainer_utils.RemoveColumnsCollator(collate, ["input_ids", "attention_mask"])
    rows = [{"input_ids": [*range(5, 5 + length)], "attention_mask": [1] * length, "more": 1} for length in (9, 12, 4)]
    for one in (collate, wrapped):
        look_at_collate(one, [{k: v for k, v in row.items() if k != "more"} for row in rows], 6, found := Inspected())
        assert found == seen
        assert getattr(collate, "generator", None) is None


def test_the_default_collator_of_transformers() -> None:
    look_at_collate(transformers.default_data_collator, [{"x": [1, 2], "label": 1}], 2, seen := Inspected())
    assert seen == Inspected()
