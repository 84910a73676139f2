"""A small mixture-of-experts language model with deferred weight gradients, on two CPU processes under FSDP2.

::

    python examples/deferred_moe.py             # weight gradients wait for the end of the step
    python examples/deferred_moe.py --no-defer  # FSDP2 as it is: the same losses

It learns to continue Python source, byte by byte, from the standard library's own files. Each step has four
micro-batches and one reduction; the weight gradients of the experts and of the other linear layers are computed in the
last of them, right before their block is reduced. It prints bits per byte and fails if they do not get below what the
frequencies of single bytes give. Losses go to ``outputs/deferred_moe/<deferred or plain>/history.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from quiet import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightning_zeroplus as zp

CONTEXT, WIDTH, HEADS, EXPERTS, LAYERS = 64, 64, 4, 4, 2
MICRO_BATCHES = 4


class Sources(Dataset[Tensor]):
    """Windows of ``CONTEXT + 1`` bytes of the standard library's modules, in alphabetical order."""

    def __init__(self, windows: int) -> None:
        text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.windows = windows
        self.stride = (len(self.bytes) - CONTEXT - 1) // windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * self.stride :][: CONTEXT + 1].long()

    def entropy_of_single_bytes(self) -> float:
        """Bits per byte of a model that knows only how frequent each byte is."""
        frequency = self.bytes.bincount(minlength=256).double() / len(self.bytes)
        return float(-(frequency * frequency.clamp_min(1e-12).log2()).sum())


class Mixture(nn.Module):
    """Every token goes to one of the experts, as in Switch Transformers: two grouped linear layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = zp.DeferredGroupedLinear(EXPERTS, WIDTH, 2 * WIDTH)
        self.down = zp.DeferredGroupedLinear(EXPERTS, 2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(tokens, WIDTH)`` to the same, and the loss that balances the experts."""
        probabilities = self.router(x).float().softmax(-1)
        weight, expert = probabilities.max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=EXPERTS)
        rows = self.down(F.gelu(self.up(x[order], counts)), counts)
        y = torch.zeros_like(rows).index_copy(0, order, rows)  # under autocast, rows may have another dtype
        balance = EXPERTS * (probabilities.mean(0) * counts / len(x)).sum()
        return weight[:, None].to(y.dtype) * y, balance


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mixture_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(batch, CONTEXT, WIDTH)`` to the same, and the balancing loss."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        y, balance = self.mixture(self.mixture_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``(batch, CONTEXT)`` to ``(batch * CONTEXT, 256)`` logits, and the balancing loss."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x).flatten(0, 1)), torch.stack(balances).mean()


class Task(LightningModule):
    """Manual optimization: one window, and so one reduction, for the micro-batches of a step.

    Args:
        defer: Whether weight gradients wait.
        seed: Of the initial weights.
    """

    def __init__(self, defer: bool, seed: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(seed)
        self.model = LanguageModel()
        if defer:
            zp.defer_weight_grads(self.model, "blocks.*")  # the strategy gives the store
        else:
            for module in self.modules():
                if isinstance(module, zp.DeferredGroupedLinear):
                    module.store = zp.WeightGradStore()  # one that nobody opens
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        total = torch.zeros(())
        with self.trainer.strategy.coalesce(backwards=MICRO_BATCHES):
            for tokens in batch.chunk(MICRO_BATCHES):
                logits, balance = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
                self.manual_backward((loss + 0.01 * balance) / MICRO_BATCHES)
                total += loss.detach().cpu() / MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad()
        bits = torch.as_tensor(self.all_gather(total.to(self.device))).mean() / math.log(2)
        self.losses.append(bits.item())
        self.log("bits_per_byte", bits, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--no-defer", action="store_true", help="compute weight gradients in every backward")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs", "deferred_moe"))
    arguments = parser.parse_args()

    quiet()
    seed_everything(arguments.seed)
    task, data = Task(not arguments.no_defer, arguments.seed), Sources(windows=32 * 2 * arguments.steps)
    trainer = Trainer(
        strategy=zp.ZeroPlusFSDPStrategy(wrap=Block),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision=arguments.precision,
        max_steps=arguments.steps,
        log_every_n_steps=1,
        callbacks=[TQDMProgressBar(refresh_rate=10)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(task, DataLoader(data, batch_size=32, shuffle=True))
    history = {"loss": task.losses, "seconds_per_step": (time.perf_counter() - start) / arguments.steps}
    if torch.cuda.is_available():
        history["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    last, required = sum(task.losses[-5:]) / 5, data.entropy_of_single_bytes()
    if trainer.is_global_zero:
        folder = arguments.output_dir / ("plain" if arguments.no_defer else "deferred")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "history.json").write_text(json.dumps(history, indent=1), encoding="utf-8")
        print(f"{last:.2f} bits per byte (frequencies of single bytes: {required:.2f}, uniform: 8)")
    return 0 if last < required else 1


if __name__ == "__main__":
    sys.exit(main())
