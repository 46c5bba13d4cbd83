"""YAML in and out. What people mean is what they get: `1:4` is text and no 64, `no` is text, a key stands once."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

__all__ = ("Refused", "documents", "printed")


class Refused(ValueError):
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
        Refused: It is no YAML, or PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        return [document for document in yaml.load_all(text, Loader=_loader()) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise Refused(f"{name}{where}: this is no YAML: {reason}") from error


def printed(objects: Sequence[Any]) -> str:
    """The objects as YAML documents, keys in their own order."""
    yaml = _yaml()
    texts = [yaml.dump(one, Dumper=_dumper(), sort_keys=False, width=110) for one in objects]
    return "---\n".join(texts)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise Refused("files in YAML need PyYAML: pip install PyYAML") from error
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
        ("null", r"~|null|", ["~", "n", ""]),
    ):
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), list(first))
    loader.add_constructor("tag:yaml.org,2002:map", _mapping)
    return loader


def _mapping(loader: Any, node: Any) -> dict[Any, Any]:
    """A mapping whose keys each stand once: PyYAML would keep the last one without a word."""
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            yaml = _yaml()
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} stands twice", key.start_mark)
        seen.add(str(key.value))
    loader.flatten_mapping(node)
    return dict(loader.construct_pairs(node, deep=True))


@functools.cache
def _dumper() -> Any:
    """PyYAML's safe dumper without aliases, which kubectl reads and people do not."""
    yaml = _yaml()
    return type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
