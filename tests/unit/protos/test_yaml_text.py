"""YAML is read as people mean it."""

from __future__ import annotations

import sys

import pytest

from dalsegno.protos.yaml_text import InputRefused, documents, printed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:4", "1:4"),
        ("1:00:00", "1:00:00"),
        ("no", "no"),
        ("on", "on"),
        ("2026-01-01", "2026-01-01"),
        ("010", "010"),
        ("4", 4),
        ("-4", -4),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("-2E+3", -2000.0),
        ("1.5e3", 1500.0),
        ("1e", "1e"),
        ("e5", "e5"),
        ("true", True),
        ("~", None),
        ("'4'", "4"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    """PyYAML by itself would read 1:4 as 64, no as false, and 010 as 8."""
    assert documents(f"a: {text}", "job.yaml") == [{"a": value}]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\na: 2", "job.yaml, line 2: this is no YAML: the key a stands twice"),
        ("a: [1", "job.yaml, line 1: this is no YAML: "),
        ("a: !!python/object:os.system x", "job.yaml, line 1: this is no YAML: could not determine a constructor"),
        ("a: \x01", "job.yaml: this is no YAML: "),
    ],
)
def test_what_is_no_yaml_is_refused(text: str, line: str) -> None:
    """With the line it stands on; a key that stands twice is not taken for the last one."""
    with pytest.raises(InputRefused) as said:
        documents(text, "job.yaml")
    assert said.value.lines[0].startswith(line)


NUMBERS = [
    "1.5e3",
    ".5e3",
    "1.e3",
    "-1.5E3",
    "+.5e-3",
    "1e3",
    "-2E+3",
    "1.",
    ".5",
    "1.5",
    "0",
    "08",
    "-08",
    "010",
    "0o17",
    "-0o17",
    "0x1F",
    "0b1",
    "12",
    "-4",
    "+4",
]
OTHERS = [
    "1_000",
    "1:4",
    "1:00:00",
    ".",
    "e5",
    "1e",
    "~",
    "null",
    "true",
    "no",
    "on",
    ".inf",
    ".nan",
    "-",
    "=",
    "<<",
    "2026-01-01",
]


@pytest.mark.parametrize("text", NUMBERS + OTHERS)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    """For us, and for kubectl, which takes 0o17 and 08 for numbers, too."""
    made = printed([{"a": text, text: "b"}])
    assert documents(made, "printed") == [{"a": text, text: "b"}]
    assert text not in NUMBERS or f"a: '{text}'" in made


def test_what_is_printed_is_read_again() -> None:
    """Text that looks like a number stays text, nothing is an alias, and keys keep their order."""
    inner = {"x": "4", "b": "1:4", "a": "no"}
    text = printed([{"one": inner, "two": inner}, [1]])
    assert "&" not in text
    found = documents(text, "printed")
    assert found == [{"one": inner, "two": inner}, [1]]
    assert list(found[0]["one"]) == ["x", "b", "a"]


def test_without_pyyaml_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base install does not have it."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InputRefused, match=r"files in YAML need PyYAML: pip install PyYAML"):
        documents("a: 1", "job.yaml")


@pytest.mark.parametrize("value", ["1e3", "-2E+3", "1e-3", 0.001, 1e30, "1e", "010"])
def test_what_is_printed_is_read_as_what_it_was(value: object) -> None:
    """A text that looks like a number stays text, for kubectl, too."""
    assert documents(printed([{"a": value}]), "job.yaml") == [{"a": value}]
