"""Real text without a download: (signature, docstring) pairs from the Python sources that are installed anyway.

Sources are parsed with ``ast`` and never imported. The order is fixed, texts are unique, and train and validation
share no module, so nothing of a validation pair was seen in training.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Packages to read next to the standard library; one that is not installed is skipped.
PACKAGES = (
    "_pytest", "deepspeed", "lightning", "matplotlib", "networkx", "numpy", "rich", "scipy", "sklearn", "sympy",
    "torch", "torchmetrics",
)  # fmt: skip

# Folders that hold tests, generated tables or copies rather than documented functions.
_SKIPPED_FOLDERS = frozenset(
    "test tests testing _vendor _vendored externals idlelib lib2to3 site-packages pydoc_data encodings".split()
)
_MAX_FILE_BYTES = 150_000  # the largest files are tables and generated code
_MARKUP = re.compile(r":[\w:]+:`~?([^`]*)`|`+|\*+")  # reStructuredText roles, quotes and emphasis


class Pair(NamedTuple):
    """A documented function.

    Attributes:
        module: Dotted name of the module, by which the pairs are split.
        signature: Such as ``Graph.add_edge(u, v, weight=1)``.
        docstring: First paragraph of the docstring, on one line.
    """

    module: str
    signature: str
    docstring: str


def mine_pairs(packages: tuple[str, ...] = PACKAGES) -> list[Pair]:
    """All pairs of the standard library and ``packages``, in a fixed order, no text twice."""
    seen: set[str] = set()
    pairs = []
    collects = gc.isenabled()
    gc.disable()  # syntax trees are many objects and no cycles: looking for some takes a third of the time
    try:
        for path, module in _source_files(packages):
            for pair in _pairs_of(path, module):
                # Copied functions and boilerplate ("See the base class.") would be wrong negatives of one another.
                keys = {pair.signature.lower(), pair.docstring.lower()}
                if seen.isdisjoint(keys):
                    pairs.append(pair)
                seen |= keys
    finally:
        if collects:
            gc.enable()
    return pairs


def split_by_module(pairs: list[Pair], every: int = 10) -> tuple[list[Pair], list[Pair]]:
    """Put one module in ``every`` into validation: ``(train, validation)``. Stable across runs and machines."""
    held_out = [zlib.crc32(pair.module.encode()) % every == 0 for pair in pairs]
    train = [pair for pair, held in zip(pairs, held_out, strict=True) if not held]
    validation = [pair for pair, held in zip(pairs, held_out, strict=True) if held]
    return train, validation


def _source_files(packages: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    paths = sysconfig.get_paths()
    trees = [(Path(paths["stdlib"]), Path(paths["stdlib"]))]
    trees += [(Path(paths["purelib"]), Path(paths["purelib"], package)) for package in packages]
    for root, tree in trees:
        for path in sorted(tree.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            private = any(part.startswith("_") for part in parts[1:-1])
            if not private and _SKIPPED_FOLDERS.isdisjoint(parts) and path.stat().st_size <= _MAX_FILE_BYTES:
                yield path, ".".join(parts)


def _pairs_of(path: Path, module: str) -> Iterator[Pair]:
    try:
        source = path.read_text(encoding="utf-8")
        if '"""' not in source:
            return  # parsing is what takes time
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's strings
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    yield from _walk(tree, module, prefix="")


def _walk(node: ast.Module | ast.ClassDef, module: str, prefix: str) -> Iterator[Pair]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, module, prefix=f"{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("__"):
            docstring = _first_paragraph(child)
            if docstring is not None:
                yield Pair(module, f"{prefix}{child.name}{_parameters(child)}", docstring)


def _first_paragraph(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The docstring's first paragraph, or None if there is none that says something in words."""
    paragraph = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").split("\n\n")[0]
    text = " ".join(_MARKUP.sub(r"\1", paragraph).split())
    says_something = 24 <= len(text) <= 240 and len(text.split()) >= 4 and text.isascii()
    repeats_signature = f"{node.name}(" in text
    return text if says_something and not repeats_signature and not text.startswith(">>>") else None


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Parameters and result, without ``self`` and ``cls``, as source text."""
    listed = [*node.args.posonlyargs, *node.args.args]
    if listed and listed[0].arg in ("self", "cls"):
        (node.args.posonlyargs or node.args.args).pop(0)
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(node.args)}){result}"
