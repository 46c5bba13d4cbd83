"""What the names of a script's files tell: which are one checkpoint, which number it has, which are none. Pure.

Numbers of ranks, shards and versions are no steps: a checkpoint in parts is not several checkpoints.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = [
    "LARGEST",
    "counts_progress",
    "goes_on_from",
    "is_data",
    "is_log",
    "is_pattern",
    "is_setting",
    "is_state",
    "is_unfinished",
    "matches",
    "number_of",
    "ranks_of",
    "series_of",
    "unversioned",
]

# The largest number that is a step; `CheckpointName` has room for 18 digits.
LARGEST = 10**15
_DIGITS = "0*([0-9]{1,15})"
# Behind a letter that is no part of the word there would be another word.
_WORD = "(?:^|(?<=[^a-z])|(?<=[0-9]))"
_STEP = re.compile(rf"{_WORD}(?:global[-_]?)?(?:steps?|iter(?:ation)?s?|it|updates?|batch)[-_=.]?{_DIGITS}(?![0-9])")
# Composer's, in files only: directories are named by hashes, which have such letters, too.
_BATCH = re.compile(rf"(?<![a-z0-9])ba{_DIGITS}(?![a-z0-9])")
_PASS = re.compile(rf"{_WORD}(?:epochs?|ep)[-_=.]?{_DIGITS}(?![0-9])")
_SAVE = re.compile(rf"{_WORD}(?:checkpoint|ckpt|chkpt|cp|snapshot|save|model|state)s?[-_=.]?{_DIGITS}(?![0-9.])")
# Right behind the word, where an ending follows. `model1.pt` and `model2.pt` are two networks, `model50.pt` has a size.
_GLUED = re.compile(rf"{_WORD}(?:checkpoint|ckpt|chkpt|snapshot|model|state)s?(?=0[0-9]|[0-9]{{4}}){_DIGITS}(?![0-9.])")
_BARE = re.compile(rf"(?:^|[-_=.]){_DIGITS}$")
# What has a number and is no step.
_PARTS = re.compile(
    rf"{_WORD}(?:rank|proc(?:ess)?|gpu|node|worker|shard|part|mp|dp|tp|pp|ep_rank|local|seed|version|v|run|exp)s?"
    r"[-_=.]?[0-9]+(?:[-_]?of[-_]?[0-9]+)?|[0-9]+[-_]?of[-_]?[0-9]+"
)
_LAST = frozenset(("last", "latest"))
_RANK = re.compile(rf"{_WORD}(?:rank|proc(?:ess)?)[-_=.]?([0-9]{{1,9}})")
_FLOAT = re.compile(r"[0-9]+\.[0-9]+(?:e[-+]?[0-9]+)?")
_VERSION = re.compile(r"-v[0-9]+(?=\.[A-Za-z]+$)")
_ANY = re.compile("[0-9]+")
# In front of the word. A number of passes there is rather that of a whole training, and a small one is a setting
# (`student_4_steps.pt`).
_COUNTED = re.compile(r"(?<![0-9.])0*([0-9]{3,15})[-_](?:steps?|iter(?:ation)?s?)(?![a-z0-9])")
# Logs, settings, pictures, notes; and what is being written.
_NO_DATA = re.compile(
    r".+\.(?:txt|log|out|err|jsonl?|csv|tsv|ya?ml|toml|ini|cfg|md|rst|html|pyc?|sh|png|jpe?g|gif|svg|pdf|wandb|te?mp"
    r"|part|partial|lock|pid|swp)",
    re.DOTALL,
)
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete")
# Endings of what belongs to a save for sure. Samples and features may be arrays, tables or sounds.
_STATES = frozenset(("pt", "pth", "bin", "ckpt", "safetensors", "pkl", "distcp"))
# Endings of what a script may need to load a checkpoint.
_SETTINGS = frozenset(("json", "yaml", "yml", "toml", "ini", "cfg", "txt", "py"))
# Words in the names of those that are logs.
_OF_LOGS = frozenset(("log", "logs", "stdout", "stderr", "nohup"))
_LOG = re.compile(r".*\.(?:log|out|err|csv|tsv|jsonl|wandb|png|jpe?g|gif|svg|pdf|html)", re.DOTALL)


def is_data(name: str) -> bool:
    """Whether a file of this name may be a checkpoint, rather than a log, a note, or something under another name."""
    name = name.lower()
    return not (name.startswith(".") or "tfevents" in name or _NO_DATA.fullmatch(name))


def is_state(path: str) -> bool:
    """Whether a file's ending is one of those that frameworks give to what they save."""
    return path.rpartition(".")[2].lower() in _STATES


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is one that is being written, and gets another name at its end."""
    return name.lower().endswith(_UNFINISHED)


def is_log(path: str) -> bool:
    """Whether a file that is no checkpoint is one of those that a training writes beside its checkpoints."""
    name = path.rpartition("/")[2].lower()
    return "tfevents" in name or name.startswith(".") or bool(_LOG.fullmatch(name))


def is_setting(name: str) -> bool:
    """Whether a file that is no checkpoint may be what a script needs to load one: its settings, a vocabulary, code."""
    words = re.split("[^a-z]+", name.lower())
    is_of_a_log = name.startswith(".") or not _OF_LOGS.isdisjoint(words)
    return words[-1] in _SETTINGS and not is_of_a_log and name.isprintable()


def number_of(name: str, *, directory: bool = False) -> int | None:
    """The number that says how far a training is; None: there is none.

    Args:
        name: of a file or a directory, without what it lies in.
        directory: it names a directory: then there must be a word for what is counted, or nothing but the number.
    """
    text = _PARTS.sub("", name.lower())
    for word in (_STEP, *(() if directory else (_BATCH,)), _PASS, _SAVE):
        if match := word.search(text):
            return int(match[1])
    if not directory and (match := _COUNTED.search(text)):
        return int(match[1])
    if directory:
        return int(name) if name.isascii() and name.isdecimal() and int(name) < LARGEST else None
    stem = _stem(text)
    if _FLOAT.search(stem):
        return None  # a loss
    match = _GLUED.search(stem) or _BARE.search(stem.rstrip("-_=."))
    return int(match[1]) if match else None


def ranks_of(names: Iterable[str]) -> set[int]:
    """The ranks that files are of, as far as their names say it. Random generators, which a rank can do without, don't
    count."""
    named = (_RANK.search(name.lower()) for name in names if "rng" not in name and "random" not in name)
    return {int(match[1]) for match in named if match}


def counts_progress(name: str) -> bool:
    """Whether a file's name has a word for steps or passes at its number, which is no rank's then."""
    text = _PARTS.sub("", name.lower())
    return any(word.search(text) for word in (_STEP, _BATCH, _PASS, _COUNTED))


def series_of(path: str) -> str:
    """The same text for the same checkpoint of other steps."""
    return _ANY.sub("#", path)


def goes_on_from(paths: Sequence[str]) -> str:
    """The one of several files without a number that a script goes on from; "": they are a checkpoint only together.

    It is the one beside copies that are kept as the best, or the one that is called the last.
    """
    words = {path: re.split("[^a-z]+", path.rpartition("/")[2].lower()) for path in paths}
    going_on = [path for path in paths if "best" not in words[path]]
    last = [path for path in going_on if not _LAST.isdisjoint(words[path])]
    found = going_on if len(going_on) == 1 else last
    return found[0] if len(found) == 1 else ""


def unversioned(path: str) -> str:
    """The name that Lightning wanted to give a file when another one had it: `last-v1.ckpt` is another `last.ckpt`."""
    return _VERSION.sub("", path)


def _stem(name: str) -> str:
    """A file's name without `.tar.gz` or `.pt`; a number behind the last dot is no ending."""
    return re.sub(r"(?:\.[a-z][a-z0-9]*)+$", "", name)


def is_pattern(text: str) -> bool:
    """Whether a glob can be looked for below a directory: relative, without a way out."""
    return bool(text) and not text.startswith("/") and not {"", "..", "."} & set(text.strip("/").split("/"))


def matches(pattern: str, path: str) -> bool:
    """Whether a path below the save directory matches: `*`, `?`, `[…]` within a name, `**` for any directories."""
    return _matches(tuple(pattern.strip("/").split("/")), tuple(path.split("/")))


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern or not path:
        return not path and all(one == "**" for one in pattern)
    if pattern[0] == "**":
        return _matches(pattern[1:], path) or _matches(pattern, path[1:])
    return _name(pattern[0]).fullmatch(path[0]) is not None and _matches(pattern[1:], path[1:])


@lru_cache(maxsize=256)
def _name(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))
