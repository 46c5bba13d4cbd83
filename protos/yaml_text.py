"""YAML in and out. What people mean is what they get: `1:4` is text and no 64, `no` is text, a key stands once."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

__all__ = ("InputRefused", "documents", "printed")

# The most values of a document, with each alias counted as what it stands for: nobody types so many, and a few aliases
# of aliases make a thousand million of them.
MOST_VALUES = 100_000
# A number that PyYAML by itself takes for text, and YAML 1.2, kubectl and people do not.
WITHOUT_POINT = r"[-+]?[0-9]+[eE][-+]?[0-9]+"
# What one reader of YAML or another takes for a number; PyYAML knows some of it by itself. Such a text is quoted.
LIKE_A_NUMBER = r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|0o[0-7]+)"


class InputRefused(ValueError):
    """What a person must change, one line for each finding: what is wrong, why, and what to write instead."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def documents(text: str, name: str) -> list[Any]:
    """The documents of a YAML file that are not empty.

    Args:
        text: Of the file.
        name: Of the file, for the line about what is wrong.

    Raises:
        InputRefused: It is no YAML, it is nested too deep, aliases make it too large, or PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        found = [document for document in yaml.load_all(text, Loader=_loader()) if document is not None]
        if any(_values(document, {}) > MOST_VALUES for document in found):
            raise InputRefused(
                f"{name}: it has more than {MOST_VALUES} values, each alias counted as what it stands for"
            )
        return found
    except RecursionError as error:
        raise InputRefused(f"{name}: it is nested too deep") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputRefused(f"{name}{where}: this is no YAML: {reason}") from error


def _values(value: Any, seen: dict[int, int]) -> int:
    """How many values there are in it; what several aliases share is looked at once."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in seen:
        parts = value.values() if isinstance(value, dict) else value
        seen[id(value)] = 1 + sum(_values(part, seen) for part in parts)
    return seen[id(value)]


def printed(objects: Sequence[Any]) -> str:
    """The objects as YAML documents, keys in their own order."""
    yaml = _yaml()
    texts = [yaml.dump(one, Dumper=_dumper(), sort_keys=False, width=110) for one in objects]
    return "---\n".join(texts)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise InputRefused(
            "files in YAML need PyYAML: pip install PyYAML (it comes with the extras relay and deploy)"
        ) from error
    return yaml


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader with YAML 1.2's scalars: 1.1 reads `1:4` as base 60, and `no` as false."""
    yaml = _yaml()
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, pattern, first in (
        ("bool", r"true|false|True|False", "tfTF"),
        ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
        ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
        ("float", WITHOUT_POINT, "-+0123456789"),
        ("null", r"~|null|", ["~", "n", ""]),
    ):
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), list(first))
    loader.add_constructor("tag:yaml.org,2002:map", _mapping)
    for kind in ("bool", "int", "float", "timestamp"):
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", _scalar(f"tag:yaml.org,2002:{kind}"))
    return loader


def _mapping(loader: Any, node: Any) -> dict[Any, Any]:
    """A mapping whose keys each stand once: PyYAML would keep the last one without a word."""
    yaml = _yaml()
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key is a word, no list or mapping", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} stands twice", key.start_mark)
        seen.add(str(key.value))
    loader.flatten_mapping(node)
    return dict(loader.construct_pairs(node, deep=True))


def _scalar(kind: str) -> Any:
    """PyYAML's own way to make a value of this kind; what it cannot make (`!!int word`, 5,000 digits) has a line."""
    yaml = _yaml()
    make = yaml.SafeLoader.yaml_constructors[kind]

    def made(loader: Any, node: Any) -> Any:
        try:
            return make(loader, node)
        except (ValueError, LookupError, AttributeError) as error:
            what = f"{str(node.value)[:40]!r} is no {kind.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error

    return made


@functools.cache
def _dumper() -> Any:
    """PyYAML's safe dumper without aliases, which kubectl reads and people do not; several lines stay lines."""
    yaml = _yaml()
    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else "'" if re.fullmatch(LIKE_A_NUMBER, value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    dumper.add_representer(str, text)
    return dumper
