"""The package ``pytorch_lightning``: the same strategies, callbacks and losses over its classes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zeroplus.testing import RankError, train_reference
from tests.support.patterns import PATTERNS, batches, build


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NAMES = "print(sum(name.startswith('zeroplus') for name in StrategyRegistry))"


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("first", ["lightning_zeroplus", "pytorch_lightning"])
def test_names_are_registered_whichever_comes_first(first: str) -> None:
    second = "pytorch_lightning" if first == "lightning_zeroplus" else "lightning_zeroplus"
    code = f"import {first}, {second}\nfrom pytorch_lightning.strategies import StrategyRegistry\n{NAMES}"
    assert _python(code) == "10"


@pytest.mark.slow
def test_it_costs_nothing_where_it_is_not_imported() -> None:
    code = "import sys, importlib.util, lightning_zeroplus\nimportlib.util.find_spec('pytorch_lightning')\n"
    # To look for it is not to import it; imported later, it is still noticed.
    code += "print(any(n.startswith(('pytorch_lightning', 'lightning_fabric')) for n in sys.modules))\n"
    code += f"from pytorch_lightning.strategies import StrategyRegistry\n{NAMES}"
    assert _python(code).split() == ["False", "10"]


@pytest.mark.slow
def test_what_an_engine_has_exists_once() -> None:
    code = "import sys, pytorch_lightning, lightning_zeroplus as zp, lightning_zeroplus.pytorch_lightning as twin\n"
    code += "assert twin.PartitionedWeightError is zp.PartitionedWeightError\n"
    code += "import lightning_zeroplus.pytorch_lightning.strategy.deepspeed.trainer\n"
    code += "import lightning_zeroplus.pytorch_lightning.strategy.deepspeed.fabric\n"
    code += "import lightning_zeroplus.pytorch_lightning.strategy.fsdp2.trainer\n"
    code += "print(*(name.split('.')[2] for name in sys.modules if name.startswith(twin.__name__ + '.')))"
    twice = set(_python(code).split())
    assert "strategy" in twice
    assert not twice & {"engine", "fsdp", "gradients", "weights", "weight_grads"}


def _module(pattern: str) -> Any:
    import pytorch_lightning as pl

    class Loop(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = build(pattern)

        def training_step(self, batch: Any, index: int) -> None:
            optimizer: Any = self.optimizers()
            PATTERNS[pattern](self.net, batch, self.manual_backward, index)
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.125)

    return Loop()


def _trainer(**kwargs: Any) -> Any:
    import pytorch_lightning as pl

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "use_distributed_sampler": False, **quiet}
    return pl.Trainer(**(settings | kwargs))


def _fit(stage: int, pattern: str) -> tuple[bool, float, int]:
    import lightning_zeroplus.pytorch_lightning as zp
    from tests.matrix.cells import trained_weights

    data = batches(2, 2)
    module = _module(pattern)
    audit, monitor = zp.GradientAudit(steps=2), zp.ReductionMonitor()
    trainer = _trainer(strategy=f"zeroplus_stage{stage}", callbacks=[audit, monitor])
    got: list[Tensor] = []
    audit.on_train_end = lambda trainer, module: got.extend(trained_weights(module.net, trainer.strategy.model))
    trainer.fit(module, DataLoader([ranks[trainer.global_rank] for ranks in data], batch_size=None))
    want = train_reference(build(pattern), lambda params: torch.optim.SGD(params, 0.125), PATTERNS[pattern], data)
    close = all(torch.allclose(a, b, atol=1e-7) for a, b in zip(got, want.params[-1], strict=True))
    return close, max(result.error for result in audit.results), audit.audited_steps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_and_callbacks(ranks2: Any, stage: int) -> None:
    for close, error, steps in ranks2.run(_fit, stage, "several"):
        assert close and error < 1e-6 and steps == 2


def _cached(stage: int) -> bool:
    import pytorch_lightning as pl

    import lightning_zeroplus.pytorch_lightning as zp
    from tests.matrix.cells import trained_weights

    def loss_fn(embeddings: Tensor) -> Tensor:
        return (embeddings @ embeddings.T).square().mean()

    class Cached(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization, self.net = False, nn.Linear(4, 4)
            self.loss = zp.CachedLoss(loss_fn, chunk_size=2)

        def training_step(self, batch: Tensor, index: int) -> None:
            optimizer: Any = self.optimizers()
            self.loss(self, self.net, batch)
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module, rows = Cached(), [torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    want = nn.Linear(4, 4)
    want.load_state_dict(module.net.state_dict())
    sum(loss_fn(want(each)) / 2 for each in rows).backward()
    trainer = _trainer(strategy=zp.ZeroPlusStrategy(stage=stage))
    trainer.fit(module, DataLoader([rows[trainer.global_rank]], batch_size=None))
    got = trained_weights(module.net, trainer.strategy.model)
    return all(
        torch.allclose(a, b.detach() - 0.1 * b.grad, atol=1e-6) for a, b in zip(got, want.parameters(), strict=True)
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_cached_loss(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_cached, stage) == [True, True]


def _refusals() -> list[str]:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    import lightning_zeroplus as other
    import lightning_zeroplus.pytorch_lightning as zp

    messages = []
    with pytest.raises(MisconfigurationException, match="`stage` must be"):
        zp.ZeroPlusStrategy(stage=9)
    assert issubclass(zp.ZeroPlusStrategy, pl.strategies.DeepSpeedStrategy)
    try:
        _trainer(strategy=other.ZeroPlusStrategy(stage=2))  # the other package's class
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_the_classes_do_not_mix(ranks2: Any) -> None:
    for messages in ranks2.run(_refusals):
        assert len(messages) == 1 and "invalid strategy" in messages[0]


def _command_line(directory: str) -> str:
    from pathlib import Path

    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.demos.boring_classes import BoringModel

    import lightning_zeroplus  # noqa: F401

    config = Path(directory, "run.yaml")
    config.write_text(
        "trainer: {strategy: zeroplus_stage2, accelerator: cpu, devices: 2, max_steps: 1, logger: false,"
        " enable_checkpointing: false, enable_progress_bar: false, enable_model_summary: false}"
    )
    cli = LightningCLI(BoringModel, args=["fit", "--config", str(config)], save_config_callback=None)
    return type(cli.trainer.strategy).__module__


def test_its_command_line(ranks2: Any, tmp_path: Any) -> None:
    module = "lightning_zeroplus.pytorch_lightning.strategy.deepspeed.trainer"
    assert ranks2.run(_command_line, str(tmp_path)) == [module] * 2


def _fabric() -> str:
    import lightning_fabric
    import pytorch_lightning  # noqa: F401

    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="zeroplus_stage2")
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    before = net.weight.detach().clone()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 1.0))
    for _ in range(2):
        fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert torch.equal(net.weight.detach(), before - 2)
    return type(fabric.strategy).__name__


def test_lightning_fabric(ranks2: Any) -> None:
    assert ranks2.run(_fabric) == ["ZeroPlusFabricStrategy"] * 2


def _unknown() -> None:
    import pytorch_lightning  # noqa: F401

    _trainer(strategy="zeroplus_stage9")


def test_an_unknown_name(ranks2: Any) -> None:
    with pytest.raises(RankError, match="invalid strategy name"):
        ranks2.run(_unknown)
