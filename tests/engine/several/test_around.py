"""What surrounds several optimizers: checkpoints, Fabric, norms, the audit, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankPool
from tests.support.training import trainer

ROWS = 12  # of each batch of all ranks
DDP = "ddp_find_unused_parameters_true"


class Gan(pl.LightningModule):
    """Two optimizers of different kinds, each with a scheduler; the generator steps in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.d = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.norms: list[tuple[float | None, float | None]] = []

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizers: Any = self.optimizers()
        g, d = optimizers
        fake = self.g(batch)
        self.manual_backward(F.softplus(-self.d(batch + 1)).mean() + F.softplus(self.d(fake.detach())).mean())
        self.clip_gradients(d, 0.05, "norm")
        d.step()
        if not index % 2:
            self.manual_backward(self.d(batch).mean())
            g.step()  # it has no gradient: nothing is updated, and no norm is noted
        d.zero_grad()
        if index % 2:
            self.manual_backward(F.softplus(-self.d(fake)).mean())
            g.step()
            self.zero_grad()
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()  # type: ignore[call-arg]
        norm = getattr(self.trainer.strategy, "grad_norm", None)
        if norm is not None:
            self.norms.append((norm(g), norm(d)))

    def configure_optimizers(self) -> Any:
        both = [torch.optim.Adam(self.g.parameters(), 0.02), torch.optim.SGD(self.d.parameters(), 0.1, momentum=0.9)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both]


def data(steps: int = 6) -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(steps, ROWS, 5, generator=generator).chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return DataLoader(list(rows), batch_size=None)  # type: ignore[arg-type]


def strategy(stage: Any) -> Any:
    if stage == "ddp":
        return DDP
    zero = {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 0}
    return zp.ZeroPlusStrategy(stage, config={"zero_optimization": zero})


def fit(stage: Any, load: str | None = None, save: str | None = None, epochs: int = 2) -> list[Tensor]:
    module = Gan()
    run = trainer(
        strategy(stage), max_epochs=1 if save else epochs, devices=dist.get_world_size(), use_distributed_sampler=False
    )
    run.fit(module, data(), ckpt_path=load)
    if save:
        run.save_checkpoint(save)
    return [param.detach().clone() for param in module.parameters()]


def _save(folder: str, stages: list[Any]) -> list[Tensor]:
    for stage in stages:
        fit(stage, save=f"{folder}/{stage}")
    return fit("ddp")


def _resume(folder: str, pairs: list[tuple[Any, Any]]) -> list[list[Tensor]]:
    return [fit(second, load=f"{folder}/{first}") for first, second in pairs]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("world_size", "pairs"), [(2, [("ddp", 2), ("ddp", 3), (0, 3), (3, 1)]), (3, [(3, 2), (1, 3)]), (1, [(2, 0)])]
)
def test_states_of_all_resume_at_other_stages(
    ranks: Callable[[int], RankPool], tmp_path: Path, world_size: int, pairs: list[tuple[Any, Any]]
) -> None:
    want = ranks(2).run(_save, str(tmp_path), sorted({first for first, _ in pairs}, key=str), timeout=200)[0]
    for resumed in ranks(world_size).run(_resume, str(tmp_path), pairs, timeout=200):
        for pair, got in zip(pairs, resumed, strict=True):
            for mine, reference in zip(got, want, strict=True):
                assert float((mine - reference).abs().max()) < 2e-6, pair


def _another_kind(path: str) -> str:
    fit(2, save=path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gan, "configure_optimizers", lambda self: torch.optim.SGD(self.parameters(), 0.1))
        with pytest.raises(RuntimeError) as caught:
            fit(2, load=path)
    return str(caught.value)


def test_other_optimizers_are_refused(ranks2: RankPool, tmp_path: Path) -> None:
    for said in ranks2.run(_another_kind, str(tmp_path / "checkpoint")):
        assert "it is the state of Adam + SGD, not SGD" in said


# -- Fabric -----------------------------------------------------------------------------------------------------------


def _fabric(stages: list[int]) -> list[tuple[float, float]]:
    results, batches = [], list(data())
    for stage in [None, *stages]:
        torch.manual_seed(0)
        module = nn.ModuleDict({"g": nn.Linear(5, 5), "d": nn.Linear(5, 1)})
        optimizers: list[Any] = [torch.optim.Adam(each.parameters(), 0.02) for each in module.values()]
        norms: list[float] = []
        if stage is None:
            model: Any = module
        else:
            run = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=f"zeroplus_stage{stage}")
            run.launch()
            model, *optimizers = run.setup(module, *optimizers)
        g, d = optimizers
        for x in batches:
            both = F.softplus(module["d"](module["g"](x))).mean()
            if stage is None:
                both.backward()
                for param in module.parameters():
                    assert param.grad is not None
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
                norms.append(float(torch.nn.utils.clip_grad_norm_(module["d"].parameters(), 0.02)))
            else:
                run.backward(both)
                norms.append(float(run.clip_gradients(model, d, max_norm=0.02)))  # type: ignore[arg-type]
            d.step()
            d.zero_grad()
            g.step()
            g.zero_grad()
        with zp.gathered(module):
            values = torch.cat([param.detach().flatten() for param in module.parameters()])
        results.append((values, torch.tensor(norms)))
    first, *others = results
    return [tuple(float((a - b).abs().max()) for a, b in zip(first, each, strict=True)) for each in others]


def test_fabric(ranks2: RankPool) -> None:
    for differences in ranks2.run(_fabric, [0, 1, 2, 3]):
        for weights, norms in differences:
            assert weights < 2e-6
            assert norms < 1e-6


def _save_and_load(folder: str, stage: int) -> tuple[float, float]:
    """How far an interrupted training is from one that is not, and from where it was interrupted."""

    def made() -> tuple[Any, ...]:
        torch.manual_seed(0)
        module = nn.ModuleDict({"g": nn.Linear(5, 5), "d": nn.Linear(5, 1)})
        run = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=f"zeroplus_stage{stage}")
        run.launch()
        return run, module, *run.setup(module, *(torch.optim.Adam(each.parameters(), 0.02) for each in module.values()))

    def train(run: Any, module: Any, model: Any, g: Any, d: Any, steps: slice) -> Tensor:
        for x in list(data())[steps]:
            run.backward(F.softplus(module["d"](module["g"](x))).mean())
            for optimizer in (d, g):
                optimizer.step()
                optimizer.zero_grad()
        with zp.gathered(module):
            return torch.cat([param.detach().flatten() for param in module.parameters()])

    want = train(*made(), slice(None))
    first = made()
    before = train(*first, slice(3))
    run, _, model, g, d = first
    run.save(folder, {"model": model, "g": g, "d": d, "step": 3})
    second = made()
    run, _, model, g, d = second
    loaded = run.load(folder, {"model": model, "g": g, "d": d})
    assert loaded["step"] == 3
    got = train(*second, slice(3, None))
    return float((got - want).abs().max()), float((got - before).abs().max())


@pytest.mark.parametrize("stage", [1, 3])
def test_fabric_saves_and_loads(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    for difference, moved in ranks2.run(_save_and_load, str(tmp_path / "checkpoint"), stage):
        assert difference < 1e-6
        assert moved > 1e-3


# -- norms, and the audit ---------------------------------------------------------------------------------------------


def _norms(stages: list[int]) -> list[Any]:
    found = []
    for stage in stages:
        module = Gan()
        audit = zp.GradientAudit(steps=4)
        trainer(strategy(stage), max_epochs=1, use_distributed_sampler=False, callbacks=[audit]).fit(module, data())
        steps = [sorted({result.name[0] for result in audit.results if result.step == step}) for step in range(4)]
        found.append((module.norms, steps, max(result.error for result in audit.results)))
    return found


def test_norms_and_audits_are_of_each_optimizer(ranks2: RankPool) -> None:
    for found in ranks2.run(_norms, [0, 1, 2, 3]):
        (reference, *_), *_ = found
        assert [g is None for g, _ in reference] == [True, False, False, False, False, False]
        assert reference[2][0] == reference[1][0], "it has not stepped since"
        assert reference[2][1] != reference[1][1]
        for norms, audited, error in found:
            assert [d for _, d in norms] == pytest.approx([d for _, d in reference], rel=1e-5)
            assert [g for g, _ in norms[1:]] == pytest.approx([g for g, _ in reference[1:]], rel=1e-5)
            assert audited == [["d"], ["d"], ["g"], ["d"]]
            assert error < 1e-6


# -- refused ----------------------------------------------------------------------------------------------------------


class _None(Gan):
    def configure_optimizers(self) -> Any:
        return []


def _empty() -> str:
    with pytest.raises(MisconfigurationException) as caught:
        trainer(strategy(2), max_epochs=1, use_distributed_sampler=False).fit(_None(), data())
    return str(caught.value)


def test_no_optimizers(ranks2: RankPool) -> None:
    for said in ranks2.run(_empty):
        assert "empty list" in said


class _Adds(Gan):
    """Gives the discriminator's optimizer a parameter that it has, in the second batch."""

    shares = False

    def training_step(self, batch: Tensor, index: int) -> None:
        if index == 1:
            before = [list(each.param_groups) for each in self.optimizers()]  # type: ignore[union-attr]
            with pytest.raises(ValueError, match="another group of this optimizer") as caught:
                self.optimizers()[1].add_param_group({"params": [self.d[0].bias]})  # type: ignore[index]
            self.said = str(caught.value)
            with pytest.raises(ValueError, match="a parameter twice"):
                self.optimizers()[1].add_param_group({"params": [self.d[0].bias] * 2})  # type: ignore[index]
            assert before == [list(each.param_groups) for each in self.optimizers()]  # type: ignore[union-attr]
        super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        if not self.shares:
            return super().configure_optimizers()
        more = [*self.d.parameters(), self.g[2].bias]
        both = [torch.optim.Adam(self.g.parameters(), 0.02), torch.optim.SGD(more, 0.1)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both]


def _adding(stage: int, shares: bool) -> str:
    module = _Adds()
    module.shares = shares
    trainer(strategy(stage), max_epochs=1, use_distributed_sampler=False).fit(module, data())
    return module.said


@pytest.mark.parametrize(("stage", "shares"), [(0, False), (2, True)])
def test_a_parameter_cannot_be_added_twice(ranks2: RankPool, stage: int, shares: bool) -> None:
    for said in ranks2.run(_adding, stage, shares):
        assert "another group of this optimizer" in said


class _Differs(Gan):
    """Assigns another optimizer on each rank."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        kind = torch.optim.SGD if self.global_rank else torch.optim.Adam
        self.trainer.optimizers = [kind(self.parameters(), 0.1)]


def _differing(stage: int) -> str:
    module = _Differs()
    with pytest.raises(ValueError, match="Adam of|SGD of") as caught:
        trainer(strategy(stage), max_epochs=1, use_distributed_sampler=False).fit(module, data())
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_assign_different_optimizers_raise(ranks2: RankPool, stage: int) -> None:
    for said in ranks2.run(_differing, stage):
        assert "the ranks have come with different arguments" in said
