"""Manual loops with buffers that a forward writes. Under Lightning's DDP each rank keeps its own there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.programs.base import Manual, step
from tests.programs.program import program
from tests.programs.run import Run


class _Quantizes(Manual):
    def build(self) -> nn.Module:
        self.register_buffer("codebook", torch.randn(5, 6))
        return nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)  # type: ignore[index]
        nearest = torch.cdist(x, self.codebook).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codebook.index_add_(0, nearest, 0.1 * (x - self.codebook[nearest]))
        return self.net[1](x + (self.codebook[nearest] - x).detach() + x * self.codebook[nearest])  # type: ignore[index]


@program()
def norm_of_a_frozen_trunk_by_hand(run: Run) -> None:
    """A frozen trunk with a BatchNorm in a manual loop of two backwards."""

    class Tunes(Manual):
        def build(self) -> nn.Module:
            trunk = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            return nn.ModuleDict({"trunk": trunk.requires_grad_(False), "head": nn.Linear(8, 4)})

        def forward(self, x: Any) -> Any:
            return self.net["head"](self.net["trunk"](x))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            for _ in range(2):
                self.manual_backward(self.loss(batch))
            step(optimizer)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], 0.02)

    run.fit(Tunes(), max_epochs=2)


@program()
def codebook_by_hand(run: Run) -> None:
    """A manual loop whose forward reads a codebook that it moves; validation in mid-epoch."""
    run.fit(_Quantizes(), val=run.loader(2), val_check_interval=2, max_epochs=2)


@program(stays=("*",))
def nothing_to_optimize(run: Run) -> None:
    """K-means in a manual loop: the training moves buffers, and there is no optimizer."""

    class Clusters(Manual):
        def build(self) -> nn.Module:
            self.register_buffer("centers", torch.randn(3, 8))
            self.register_buffer("shift", torch.zeros(8))
            return nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            nearest = torch.cdist(batch[0] + self.shift, self.centers).argmin(1)
            with torch.no_grad():
                self.centers.index_add_(0, nearest, 0.2 * (batch[0] - self.centers[nearest]))
                self.shift = self.shift * 0.9 + 0.1 * batch[0].mean(0)
            self.log("used", float(len(nearest.unique())))

        def configure_optimizers(self) -> None:
            return None

    run.fit(Clusters(), val=run.loader(2), max_epochs=2)


@program(reference="ddp_find_unused_parameters_true", on_three_ranks=True)
def spectral_norm_of_two(run: Run) -> None:
    """A GAN: its discriminator has spectral norms, whose vectors each forward in training moves; a step of each."""

    class Adversaries(Manual):
        def build(self) -> nn.Module:
            norm = parametrizations.spectral_norm
            judge = nn.Sequential(norm(nn.Linear(4, 8)), nn.LeakyReLU(0.2), norm(nn.Linear(8, 1)))
            maker = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
            maker[0].bias = None  # which batch norm would take out again
            return nn.ModuleDict({"maker": maker, "judge": judge})

        def forward(self, x: Tensor) -> Tensor:
            return self.net["maker"](x)  # type: ignore[index]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            maker, judge = self.optimizers()
            x, y = batch
            verdict = self.net["judge"]  # type: ignore[index]
            self.toggle_optimizer(judge)
            self.manual_backward((torch.relu(1 - verdict(y)) + torch.relu(1 + verdict(self(x).detach()))).mean())
            step(judge)
            self.untoggle_optimizer(judge)
            self.toggle_optimizer(maker)
            self.manual_backward(-verdict(self(x)).mean())
            step(maker)
            self.untoggle_optimizer(maker)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[name].parameters(), 0.05) for name in ("maker", "judge")]  # type: ignore[index]

    run.fit(Adversaries(), max_epochs=2)


@program()
def codebook_in_windows(run: Run) -> None:
    """The same over chunks of two batches, with a step after every second one."""

    class Chunks(_Quantizes):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
                self.manual_backward(self.loss((x, y)) / 2)
            if batch_idx % 2:
                step(optimizer)

    run.fit(Chunks(), val=run.loader(2), val_check_interval=2, max_epochs=2)
