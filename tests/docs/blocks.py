"""The code blocks of README, CONTRIBUTING and docs, and the frames in which they are run.

A block may be a fragment. A comment above it, ``<!-- frame: name -->``, names what it is a fragment of: a file of
``tests/docs/frames``, in which the line ``# BLOCK`` stands for it. What cannot run here, eight GPUs, say, is replaced
in the frame, for everybody to see. A block without a comment is whole: it is run as it is. One whose frame is
``continued`` goes on where the last Python block of the page has ended, in its frame.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
FRAMES = Path(__file__).parent / "frames"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FRAME = re.compile(r"<!-- frame: (\w+) -->")


class Block(NamedTuple):
    """A fenced code block.

    Attributes:
        page: The file, relative to the repository.
        line: The line on which its code begins, counted from 1.
        language: What its fence says.
        code: Its text.
        frame: The name in the comment above it; empty without one.
        before: For a block that is ``continued``: the blocks that it continues.
        first: The frame of the first of them.
    """

    page: str
    line: int
    language: str
    code: str
    frame: str
    before: str = ""
    first: str = ""

    @property
    def where(self) -> str:
        """``page:line``."""
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """The blocks of one page. Directives of Sphinx, ``{toctree}`` and the like, are none."""
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    found: list[Block] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type not in ("fence", "code_block") or token.info.startswith("{"):
            continue
        comment = _FRAME.search(before.content) if before is not None and before.type == "html_block" else None
        frame = comment[1] if comment else ""
        python = [block for block in found if block.language == "python"] if frame == "continued" else []
        last = python[-1] if python else None
        assert token.map is not None
        found.append(
            Block(
                path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name,
                token.map[0] + (2 if token.type == "fence" else 1),
                token.info.strip(),
                token.content,
                frame,
                "" if last is None else last.before + last.code,
                "" if last is None else last.first if last.frame == "continued" else last.frame,
            )
        )
    return found


def framed(block: Block) -> str:
    """The source of a Python block in its frame.

    Raises:
        ValueError: If there is no such frame.
    """
    frame = block.first if block.frame == "continued" else block.frame
    if not frame:
        return block.before + block.code
    path = FRAMES / f"{frame}.py"
    if not path.exists():
        raise ValueError(f"{block.where}: there is no frame {frame!r}; {path} would be it.")
    before, indent, after = re.split(r"^( *)# BLOCK$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return before + textwrap.indent(block.before + block.code, indent).rstrip() + after
