"""Plan all strategies, and recommend one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_zeroplus.plan.estimate import Estimate, Link
from lightning_zeroplus.plan.model import Model
from lightning_zeroplus.plan.replicated import ddp, stage0
from lightning_zeroplus.plan.settings import Settings
from lightning_zeroplus.plan.sharded import fsdp
from lightning_zeroplus.plan.stage3 import stage3
from lightning_zeroplus.plan.stage12 import stage12
from lightning_zeroplus.plan.zero import Zero


class Job(NamedTuple):
    """How a model is trained.

    Attributes:
        ranks: The number of devices.
        backwards: Backwards of an optimizer step, each after a forward of its own.
        accumulates: They are Lightning's ``accumulate_grad_batches``, of which DDP reduces the last only.
    """

    ranks: int
    backwards: int = 1
    accumulates: bool = False

    def check(self) -> None:
        """Refuse what is no number of ranks or backwards.

        Raises:
            ValueError: If it is not positive.
        """
        for name, value in (("ranks", self.ranks), ("backwards", self.backwards)):
            if value < 1:
                raise ValueError(f"`{name}={value}`: give a positive integer.")


def plan(model: Model, job: Job, settings: Settings | None = None) -> list[Estimate]:
    """Estimate every strategy.

    Args:
        model: What is trained; see :func:`~lightning_zeroplus.plan.describe`.
        job: How.
        settings: Of the strategies; None: their defaults.

    Returns:
        DDP, stages 0 to 3, stages 2 and 3 with offload, and FSDP2. With several backwards, stages 2 and 3 and FSDP2
        come twice: without a window and with one.

    Raises:
        ValueError: If the job is none, or the optimizer's step does not run on the meta device.
    """
    job.check()
    return list(_estimates(model, job, settings or Settings()))


def _estimates(model: Model, job: Job, settings: Settings) -> Iterator[Estimate]:
    ranks, backwards = job.ranks, job.backwards
    windows = (True,) if settings.always_waits else (False, True) if backwards > 1 else (False,)
    yield ddp(model, settings, ranks, backwards, 1 if job.accumulates else backwards)
    yield stage0(model, settings, ranks, backwards)
    if model.precision != "64-true":  # the partitions are in fp32
        yield stage12(1, Zero(model, settings, ranks, backwards, True, False, overlaps=False))
        for window in windows:
            yield stage12(2, Zero(model, settings, ranks, backwards, window, False))
        for window in windows:
            yield stage3(Zero(model, settings, ranks, backwards, window, False))
        for window in windows:
            yield stage12(2, Zero(model, settings, ranks, backwards, window, True))
        for window in windows:
            yield stage3(Zero(model, settings, ranks, backwards, window, True))
    if model.units is not None:
        for window in windows:
            yield fsdp(model, settings, ranks, backwards, window, job.accumulates)


def best(estimates: Sequence[Estimate], memory: int, link: Link, activations: int = 0) -> Estimate | None:
    """The strategy to take: it fits, leaves the optimizer on the device if it can, and is cheapest on the wire.

    Args:
        estimates: Of :func:`plan`.
        memory: Bytes of a device.
        link: The network.
        activations: Bytes that activations need besides.

    Returns:
        Of those that fit, the one with the least time on the wire, then the one of which less cannot be hidden, then
        the first; None: nothing fits.
    """
    fitting = [each for each in estimates if each.peak + activations <= memory]
    return min(
        fitting,
        key=lambda each: (each.host > 0, round(each.seconds(link), 9), round(each.exposed(link), 9)),
        default=None,
    )
