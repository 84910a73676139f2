"""A checkpoint of several files at an address: its parts, and a small object that says which parts they are.

An object store replaces one object atomically, and cannot rename. So a save writes its parts under a new unique name,
``last.ckpt.parts/UNIQUE/``, and at its end the object ``last.ckpt``, which has that name: the pointer. The address is
there if and only if a complete checkpoint is, for everybody who asks the store. The pointer names its parts relative to
itself, so both may be copied elsewhere together.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeVar

from lightning_zeroplus.checkpoint.places.address import Address, Files

OneOf = TypeVar("OneOf", Path, Address)
#: How a pointer begins; neither a zip archive, nor a pickle, nor a safetensors file does.
_MAGIC = b'{"zeroplus": "parts"'
_LARGEST = 4096
_UNIQUE = re.compile(r"[0-9a-f]{32}")


def content_of(unique: str) -> bytes:
    """The pointer to the parts with this unique name."""
    return json.dumps({"zeroplus": "parts", "format": 1, "unique": unique}).encode()


def unique_of(file: Files) -> str | None:
    """The unique name of the parts that a pointer names; None: this is an ordinary file.

    Raises:
        RuntimeError: If it is the pointer of a newer version, or damaged.
    """
    if file.stat().st_size > _LARGEST:
        return None
    with file.open("rb") as stream:
        content = stream.read()
    if not content.startswith(_MAGIC):
        return None
    try:
        found = json.loads(content)
        unique, format = found["unique"], found["format"]
    except (ValueError, KeyError) as error:
        raise RuntimeError(f"The checkpoint {str(file)!r} is damaged: it does not say where its parts are.") from error
    if format != 1 or not is_unique(unique):
        raise RuntimeError(
            f"The checkpoint {str(file)!r} has format {format!r}, which this version of lightning-zeroplus cannot read."
            " Install a newer one."
        )
    return str(unique)


def is_unique(name: object) -> bool:
    """Whether a save may have chosen this name for its parts."""
    return isinstance(name, str) and _UNIQUE.fullmatch(name) is not None


def folder_of(file: OneOf) -> OneOf:
    """The folder of all parts of the checkpoint ``file``."""
    return file.with_name(f"{file.name}.parts")
