"""Which environment variables a script sets, by its text, before it imports the libraries that read them on import.

In a process that has imported these libraries ahead such a line would have no effect, without a word. Pure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = ["early_variables"]

# Torch reads these, or what it loads (OpenMP, MKL, NumPy's OpenBLAS), or DeepSpeed; and the libraries by whose import
# they have been read. NumPy is none of them: OpenMP is loaded with torch.
_OF_TORCH = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "DS_ACCELERATOR"),
)
_TORCHES = frozenset({"torch", "torchvision", "deepspeed", "accelerate", "peft", "lightning", "pytorch_lightning"})
# The same of Hugging Face's libraries.
_OF_HUB = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_CACHE_HOME", "USE_TORCH", "USE_TF")
_HUBS = frozenset({"huggingface_hub", "transformers", "datasets", "accelerate", "peft", "swift", "trl", "diffusers"})
# These are read when they are needed.
_LATE = re.compile(
    "TORCH_NCCL_|TORCH_GLOO_|TORCH_HOME$|TORCH_EXTENSIONS_DIR$|TORCH_CUDA_ARCH_LIST$|TORCH_FORCE_|TORCH_SHOW_CPP"
    "|TORCHINDUCTOR_CACHE_DIR$|PYTORCH_NVML|PYTORCH_KERNEL_CACHE|HF_TOKEN$|TRANSFORMERS_NO_ADVISORY"
)
# Of these only the choice of an allocator is read at once.
_ALLOCATOR = re.compile("PYTORCH_(CUDA_|HIP_)?ALLOC_CONF$")
# A cheap look at a text, before it is parsed.
_MAY = re.compile(rf"(?s)(?=.*\b(?:environ|putenv)\b).*(?:{'|'.join((*_OF_TORCH, *_OF_HUB))})")


def early_variables(text: str) -> tuple[set[str], set[str]]:
    """The variables that the text of a script, or of a module of its own, sets at its top level.

    Only by a name that stands there, and before the import of what reads them: behind it they have no effect anyway.

    Returns:
        Those that torch reads, and those that only Hugging Face's libraries read.
    """
    if not _MAY.match(text):
        return set(), set()
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(), set()
    of_torch, of_hub, imported = set[str](), set[str](), set[str]()
    for node in _at_top(body):
        imported |= _imports(node)
        for name, value in _sets(node):
            if _LATE.match(name) or (_ALLOCATOR.match(name) and "backend" not in ast.dump(value)):
                continue
            if name.startswith(_OF_TORCH) and not imported & (_TORCHES | _HUBS - {"huggingface_hub"}):
                of_torch.add(name)
            elif name.startswith(_OF_HUB) and not imported & _HUBS:
                of_hub.add(name)
    return of_torch, of_hub


def _at_top(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """What is run as the module is imported, in its order: also in `if`, `try`, `for` and `with`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        blocks = [getattr(node, name, []) for name in ("body", "handlers", "orelse", "finalbody")]
        if any(blocks):
            yield from _at_top([one for block in blocks for one in block])
        else:
            yield from ast.walk(node)


def _imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {(node.module or "").partition(".")[0]}
    return set()


def _sets(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that one statement or call sets in the environment, with what it sets them to."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _named(target.slice, node.value)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
        yield from _of_mapping(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, owner = node.func.attr, node.func.value
        if (method == "setdefault" and _is_environ(owner)) or method == "putenv":
            if len(node.args) == 2:
                yield from _named(*node.args)
        elif method == "update" and _is_environ(owner):
            yield from ((one.arg, one.value) for one in node.keywords if one.arg is not None)
            for mapping in node.args:
                yield from _of_mapping(mapping)


def _is_environ(node: ast.AST) -> bool:
    """`os.environ`, or `environ` alone."""
    return (
        node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    ) == "environ"


def _named(name: ast.AST, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        yield name.value, value


def _of_mapping(mapping: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            if key is not None:
                yield from _named(key, value)
    elif isinstance(mapping, ast.Call):  # dict(NAME=…)
        yield from ((one.arg, one.value) for one in mapping.keywords if one.arg is not None)
