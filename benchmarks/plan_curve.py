"""Bytes per rank of a 7B model from 2 to 4096 ranks, as `zeroplus plan` counts them: docs/plan.png.

    python benchmarks/plan_curve.py --out docs/plan.png

A decoder of 32 layers of 4096 features, as Llama 2 7B, in bf16-mixed with AdamW and one backward per step. No device is
needed: the model has no memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning_zeroplus.plan import Estimate, Job, Settings, describe, plan

_COLORS = {
    "ddp": "black",
    "zeroplus_stage0": "tab:gray",
    "zeroplus_stage1": "tab:blue",
    "zeroplus_stage2": "tab:green",
    "zeroplus_stage3": "tab:red",
    "zeroplus_stage2_offload": "tab:olive",
    "zeroplus_stage3_offload": "tab:orange",
    "zeroplus_fsdp": "tab:purple",
}


class Layer(nn.Module):
    """The parameters of one layer of Llama 2 7B."""

    def __init__(self, features: int = 4096, hidden: int = 11008) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(features, features, bias=False) for _ in range(3))
        self.out = nn.Linear(features, features, bias=False)
        self.up = nn.ModuleList(nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, features, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(features) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError  # only the shapes count


class Decoder(nn.Module):
    """Its 6.74e9 parameters."""

    def __init__(self, layers: int = 32, features: int = 4096, tokens: int = 32000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, features)
        self.layers = nn.ModuleList(Layer(features) for _ in range(layers))
        self.norm = nn.RMSNorm(features)
        self.head = nn.Linear(features, tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def curve(worlds: list[int]) -> dict[str, list[Estimate]]:
    """The estimates of each strategy, world by world."""
    with torch.device("meta"):
        module = nn.Sequential(Decoder())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    model = describe(module, [optimizer], "bf16-mixed", wrap=Layer)
    found: dict[str, list[Estimate]] = {}
    for ranks in worlds:
        for each in plan(model, Job(ranks), Settings(wrap=Layer)):
            found.setdefault(each.strategy, []).append(each)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="where to save the figure")
    arguments = parser.parse_args()
    worlds = [2**power for power in range(1, 13)]
    found = curve(worlds)
    shown = [2, 8, 64, 512, 4096]
    print("| strategy |", " | ".join(f"{ranks} ranks" for ranks in shown), "| sent per step, 64 ranks |")
    print("|---" * (2 + len(shown)) + "|")
    for name, estimates in found.items():
        by_ranks = dict(zip(worlds, estimates, strict=True))
        sizes = (f"{by_ranks[ranks].peak / 2**30:.1f}" for ranks in shown)
        print(f"| `{name}` |", " | ".join(sizes), f"| {by_ranks[64].sent / 2**30:.1f} |")
    if arguments.out is None:
        return
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, estimates in found.items():
        peaks = [each.peak / 2**30 for each in estimates]
        style = "--" if name == "zeroplus_stage0" else "-"  # over the line of DDP
        axis.plot(worlds, peaks, style, marker="o", markersize=3, label=name, color=_COLORS[name])
    axis.axhline(80, color="tab:brown", linestyle=":", label="80 GiB")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(worlds, [str(ranks) for ranks in worlds])
    axis.set_yticks([2**power for power in range(1, 8)], [str(2**power) for power in range(1, 8)])
    axis.set_xlabel("ranks")
    axis.set_ylabel("GiB per rank, without activations")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
