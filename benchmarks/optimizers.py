"""Optimizers as packages ship them, under our strategies and under DDP.

    pip install pytorch-optimizer torch-optimizer torch-optimi schedulefree prodigyopt lion-pytorch came-pytorch \\
        bitsandbytes
    python benchmarks/optimizers.py --output docs/optimizers.md

Each optimizer trains a small network for six steps on two CPU processes, with two groups of parameters. The weights are
compared with those under DDP. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import lightning_zeroplus  # noqa: F401 - registers the strategies
from lightning_zeroplus.table import print_table
from lightning_zeroplus.testing import RankError, RankPool
from tests.conftest import settle
from tests.support.forkserver import fork_server

#: By distribution, the modules whose optimizers are run.
PACKAGES = {
    "torch": ("torch.optim",),
    "bitsandbytes": ("bitsandbytes.optim",),
    "schedulefree": ("schedulefree",),
    "prodigyopt": ("prodigyopt",),
    "lion-pytorch": ("lion_pytorch",),
    "came-pytorch": ("came_pytorch",),
    "torch-optimi": ("optimi",),
    "torch-optimizer": ("torch_optimizer",),
    "pytorch-optimizer": ("pytorch_optimizer",),
}
STRATEGIES = ("zeroplus_stage1", "zeroplus_stage2", "zeroplus_stage3", "zeroplus_fsdp")
_BOUND = 1e-5
#: How much weights that differ by so much, relatively, at the start may differ at the end: some optimizers amplify it.
_NUDGE, _MARGIN = 1e-7, 10
_STEPS = 6
_TIME_LIMIT_S = 60.0
_INTRODUCTION = f"""# Optimizers of packages

Made by `benchmarks/optimizers.py`. Each optimizer trains a small network for {_STEPS} steps on two CPU processes, with
a group of matrices and a group of vectors. Only what can be made of parameters and a learning rate is here.

`equal`: the weights are DDP's. The largest error, relative to the largest update, is at most {_BOUND:g}, or
{_MARGIN} times what a relative change of {_NUDGE:g} of the first weights makes of DDP's own. A number is a refusal,
listed below. Other errors are named; so are other weights.
"""

Verdict = tuple[str, str]


class Task(pl.LightningModule):
    """Trains with one optimizer.

    Args:
        cls: The optimizer's class.
        nudge: A relative change of the first weights.
    """

    def __init__(self, cls: Any, nudge: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 4)
        )  # one is large enough for states of 8 bits
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(1 + nudge)
        self.cls = cls

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def on_train_epoch_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            if hasattr(optimizer, "train"):  # Schedule-Free's
                optimizer.train()

    def configure_optimizers(self) -> Any:
        return make(self.cls, self.net)


def make(cls: Any, net: nn.Module) -> Optimizer:
    """An optimizer with two groups."""
    matrices, vectors = ([param for param in net.parameters() if (param.ndim > 1) == is_matrix] for is_matrix in (1, 0))
    groups = [{"params": matrices}, {"params": vectors, "lr": 0.005}]
    try:
        made = cls(groups, lr=0.01)
    except TypeError:
        made = cls(groups)
    assert isinstance(made, Optimizer)
    return made


def find(module: str) -> list[str]:
    """The optimizers of a module that can be made so."""
    found = []
    for name, cls in vars(importlib.import_module(module)).items():
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer:
            with contextlib.suppress(Exception):
                make(cls, nn.Linear(2, 2))
                found.append(name)
    return sorted(found)


def train(module: str, name: str, strategy: str, nudge: float = 0.0) -> Tensor | str:
    """Train, on a rank; the weights as one tensor, or a refusal."""
    task = Task(getattr(importlib.import_module(module), name), nudge)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(4 * 2 * _STEPS, columns, generator=generator) for columns in (64, 4)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(task, DataLoader(data, batch_size=4))
    except MisconfigurationException as refusal:
        return str(refusal)
    return torch.cat([param.detach().double().flatten() for param in task.parameters()])


def judge(ranks: RankPool, module: str, name: str) -> dict[str, Verdict]:
    """Compare with DDP; empty: DDP cannot train with it."""
    try:
        want, nudged = (ranks.run(train, module, name, "ddp", nudge)[0] for nudge in (0.0, _NUDGE))
    except RankError:
        return {}
    if any(isinstance(each, str) for each in (want, nudged)):  # Lightning refuses it
        return {}
    start = torch.cat([param.detach().double().flatten() for param in Task(None).parameters()])
    way = float((want - start).abs().max())
    if not way > 0:
        return {}
    bound = max(_BOUND, _MARGIN * float((nudged - want).abs().max()) / way)
    return {strategy: _judge(ranks, module, name, strategy, want, way, bound) for strategy in STRATEGIES}


def _judge(ranks: RankPool, module: str, name: str, strategy: str, want: Tensor, way: float, bound: float) -> Verdict:
    try:
        got = ranks.run(train, module, name, strategy)[0]
    except RankError as failed:
        last = [line.strip() for line in str(failed).splitlines() if "Error" in line]
        return "error", (last or ["?"])[-1][:120]
    if isinstance(got, str):
        return "refused", got
    error = float((got - want).abs().max()) / way
    if error <= bound:
        return "equal", ""
    return "other weights", f"{error:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--package", action="append", help="name of a package, repeatable (default: all)")
    parser.add_argument("--output", type=Path, default=Path("outputs", "optimizers.md"))
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, Verdict]]] = {}
    with RankPool(2, timeout=_TIME_LIMIT_S, initializer=settle, mp_context=fork_server()) as ranks:
        for package, modules in PACKAGES.items():
            if arguments.package and package not in arguments.package:
                continue
            with contextlib.suppress(PackageNotFoundError, ImportError):
                title = f"{package} {version(package).partition('+')[0]}"
                names = [(module, name) for module in modules for name in find(module)]
                results[title] = {name: judge(ranks, module, name) for module, name in names}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(results), encoding="utf-8")
    rows = []
    for title, found in results.items():
        verdicts = [verdict for each in found.values() for verdict, _ in each.values()]
        rows.append((title, str(len(found)), *(str(verdicts.count(each)) for each in _VERDICTS)))
    print_table("Optimizers of packages", ("package", "optimizers", *_VERDICTS), rows, right=range(1, 6))


_VERDICTS = ("equal", "refused", "error", "other weights")


def page(results: dict[str, dict[str, dict[str, Verdict]]]) -> str:
    """The page of the docs."""
    cells = [cell for found in results.values() for each in found.values() for cell in each.values()]
    counts = ", ".join(f"{sum(verdict == each for verdict, _ in cells)} {each}" for each in _VERDICTS)
    optimizers = sum(bool(each) for found in results.values() for each in found.values())
    lines = [_INTRODUCTION, f"{optimizers} optimizers, {len(cells)} cells: {counts}."]
    notes: dict[str, int] = {}
    for title, found in results.items():
        lines += ["", f"## {title}", "", "| optimizer | 1 | 2 | 3 | fsdp |", "|---|---|---|---|---|"]
        for name, each in found.items():
            shown = [_cell(each[strategy], name, notes) if each else "-" for strategy in STRATEGIES]
            lines.append(f"| `{name}` | {' | '.join(shown)} |")
    lines += ["", "`-`: DDP itself does not train with it.", "", "## Refusals", ""]
    lines += [*(f"{number}. {text}" for text, number in notes.items()), ""]
    return "\n".join(lines)


def _cell(cell: Verdict, name: str, notes: dict[str, int]) -> str:
    verdict, details = cell
    if verdict != "refused":
        return f"{verdict} {details}".strip().replace("|", "\\|")
    text = details.partition(". ")[0].replace(f"`{name}`", "It").replace("It.step", "Its step") + "."
    for stage in (1, 2, 3):
        text = text.replace(f"ZeRO stage {stage}", "this stage")
    return f"[{notes.setdefault(text, len(notes) + 1)}](#refusals)"


if __name__ == "__main__":
    main()
