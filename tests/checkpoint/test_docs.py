"""The code in docs/checkpoints.md."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tests.checkpoint import model

_PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


class _Plain(model.Tied):
    def on_train_start(self) -> None:
        pass


def _run(folder: str) -> int:
    before = os.getcwd()
    blocks = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {"module": _Plain(), "loader": model.loader()}
    os.chdir(folder)
    try:
        for block in blocks:
            exec(compile(block, str(_PAGE), "exec"), names)
    finally:
        os.chdir(before)
    return len(blocks)


def test_every_block_runs(ranks2: Any, tmp_path: Path) -> None:
    assert ranks2.run(_run, str(tmp_path)) == [6, 6]
    assert (tmp_path / "model.safetensors").exists()
