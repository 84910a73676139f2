"""The examples with their command lines, on two processes: they train under ZeRO as they do under DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


#: What DDP says in the generator's backward, which reaches all parameters; the discriminator's does not.
_ALL_USED = "did not find any unused parameters"


def _run(
    script: str, output_dir: Path, folder: str, *arguments: str, status: int = 0, warns: str | None = None
) -> dict[str, Any]:
    """Run an example, which has to exit with ``status``, and return its history."""
    command = ["--output-dir", str(output_dir), *arguments]
    result = forked.run(ROOT / "examples" / script, *command, folder=output_dir)
    assert result.returncode == status, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if warns is None or warns not in line]
    assert "Warning" not in "\n".join(lines), result.stderr
    return json.loads((output_dir / folder / "history.json").read_text(encoding="utf-8"))


# Each backward of the cached loss reaches a part of the parameters.
DDP = "ddp_find_unused_parameters_true"


def test_digits_losses_agree_and_accuracy_suffices(tmp_path: Path) -> None:
    actual = _run("digits.py", tmp_path, "zeroplus_stage3", "--strategy", "zeroplus_stage3", "--max-epochs=8")
    # An epoch is too short for the accuracy that the example requires, and enough for the losses.
    expected = _run("digits.py", tmp_path, "ddp", "--strategy", "ddp", "--max-epochs=1", status=1)

    # Rounding differs and grows over the optimizer steps, so only the first ones are comparable.
    assert len(expected["loss"]) >= 12
    assert actual["loss"][:12] == pytest.approx(expected["loss"][:12], rel=1e-4)
    assert actual["accuracy"] >= 0.95


def test_the_gan_draws_digits_with_the_losses_of_ddp(tmp_path: Path) -> None:
    actual = _run("gan.py", tmp_path, "zeroplus_stage3", "--strategy", "zeroplus_stage3", "--max-epochs=20")
    expected = _run("gan.py", tmp_path, DDP, "--strategy", DDP, "--max-epochs=1", status=1, warns=_ALL_USED)
    for name in ("discriminator", "generator"):
        assert actual[name][:12] == pytest.approx(expected[name][:12], rel=1e-4)
    assert actual["distance"] <= 5 < expected["distance"]
    assert (tmp_path / "zeroplus_stage3" / "samples.png").stat().st_size > 0


@pytest.fixture(scope="module")
def contrastive_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of all contrastive runs, so that only the first mines the data."""
    return tmp_path_factory.mktemp("contrastive")


@pytest.fixture(scope="module")
def large_batch(contrastive_dir: Path) -> dict[str, Any]:
    """The reference: one process, the global batch in one piece, nothing cached over chunks and nothing reduced."""
    return _run_contrastive(contrastive_dir, DDP, devices=1, batch_size=64, chunk_size=128)


@pytest.mark.parametrize("strategy", [DDP, "zeroplus_stage3"])
def test_cached_chunks_on_two_ranks_train_like_one_large_batch(
    contrastive_dir: Path, large_batch: dict[str, Any], strategy: str
) -> None:
    actual = _run_contrastive(contrastive_dir, strategy, devices=2, batch_size=32, chunk_size=16)

    assert len(actual["loss"]) == 6
    assert actual["loss"] == pytest.approx(large_batch["loss"], rel=1e-4)
    assert actual["learning_rate"] == large_batch["learning_rate"]
    assert actual["recall_10"] == pytest.approx(large_batch["recall_10"], abs=0.005)
    assert (contrastive_dir / strategy / "curves.png").stat().st_size > 0


def _run_contrastive(
    output_dir: Path, strategy: str, *, devices: int, batch_size: int, chunk_size: int
) -> dict[str, Any]:
    return _run(
        "cached_contrastive.py", output_dir, strategy, "--strategy", strategy, "--max-steps=6", "--validations=1",
        f"--devices={devices}", f"--batch-size={batch_size}", f"--chunk-size={chunk_size}",
        warns=_ALL_USED if strategy == DDP else None,
    )  # fmt: skip
