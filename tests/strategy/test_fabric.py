"""``lightning.fabric.Fabric``: a loop of the user's own, against the gradient reference."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TransformerEnginePrecision
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankError
from tests.matrix.cells import OPTIMIZERS, Cell, Loop, _compare, _reference, pretend_fp16_kernels, trained_weights
from tests.matrix.test_gradient_matrix import check
from tests.support.patterns import BACKWARDS, PATTERNS, batches

STAGES = (0, 1, 2, 3)


def strategy(cell: Cell) -> zp.ZeroPlusFabricStrategy:
    reduction: Any = cell.reduction
    return zp.ZeroPlusFabricStrategy(cell.stage, reduction, cell.accumulate_dtype, None, cell.config())


def fabric(which: Any, precision: Any = "32-true") -> L.Fabric:
    if precision.startswith("16"):
        pretend_fp16_kernels()
    made = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=which, precision=precision)
    made.launch()
    return made


def train(cell: Cell) -> tuple[Any, float]:
    """Train as ``cells.run_cell`` does, without a Trainer; the outcome, and how far ``clip_gradients``' norms are."""
    data = batches(cell.batch_count, dist.get_world_size())
    run = fabric(strategy(cell), cell.precision)
    result = Loop(cell)
    net = result.net
    # DeepSpeed takes trainable parameters only where the optimizer has them all.
    model, optimizer = run.setup(net, OPTIMIZERS[cell.optimizer](net.parameters()))
    norms = []
    dtype = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}[cell.kind]
    for index, ranks in enumerate(data):
        batch = tuple(part.to(dtype) for part in ranks[dist.get_rank()])
        with _window(run, model, cell):
            PATTERNS[cell.pattern](net, batch, _no_sync(run, model, cell), index)
        if not cell.steps_at(index):
            continue
        if cell.clip is not None:
            limit, algorithm = cell.clip
            norm = run.clip_gradients(model, optimizer, **{"max_norm" if algorithm == "norm" else "clip_val": limit})
            norms += [] if norm is None else [float(norm)]
        optimizer.step()
        optimizer.zero_grad()
        result.after_steps.append(trained_weights(net, model._forward_module))
        norm = run.strategy.grad_norm()
        if norm is not None:
            result.norms.append(norm)
    reference = _reference(cell, data)
    off = max((abs(got - want) / want for got, want in zip(norms, reference.norms, strict=False)), default=0.0)
    return _compare(cell, result, reference), off


def _window(run: L.Fabric, model: Any, cell: Cell) -> Any:
    made: Any = run.strategy
    match cell.window:
        case "all":
            return made.coalesce()
        case "backwards":
            return made.coalesce(backwards=BACKWARDS[cell.pattern], model=model)
        case "budget":
            return made.coalesce(max_bytes=1000)
    return contextlib.nullcontext()


def _no_sync(run: L.Fabric, model: Any, cell: Cell) -> Any:
    calls = 0

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        waits = cell.window == "no_sync" and calls < BACKWARDS[cell.pattern]
        with run.no_backward_sync(model, enabled=waits):
            run.backward(loss, **kwargs)

    return backward


def _cells() -> dict[str, Cell]:
    cells = {}
    for stage in STAGES:
        base = Cell(stage, "several")
        cells |= {
            f"{stage}-{pattern}": replace(base, pattern=pattern) for pattern in ("single", "several", "leaf_hook")
        }
        cells |= {f"{stage}-{pattern}": replace(base, pattern=pattern) for pattern in ("unused", "nested")}
        windows = ("all", "backwards", "budget", "no_sync")
        cells |= {f"{stage}-{window}": replace(base, window=window, reduction="backward") for window in windows}
        cells[f"{stage}-bf16"] = replace(base, precision="bf16-true")
        cells[f"{stage}-bf16-fp32"] = replace(base, precision="bf16-true", accumulate_dtype="float32")
        cells[f"{stage}-across"] = replace(base, across=2)
        cells[f"{stage}-adamw"] = replace(base, optimizer="adamw")
        for limit, algorithm in ((0.05, "norm"), (0.01, "value")):
            for precision in ("32-true", "bf16-true", "16-true")[: 3 if algorithm == "norm" else 1]:
                cells[f"{stage}-clip-{algorithm}-{precision}"] = replace(
                    base, clip=(limit, algorithm), precision=precision
                )
    return {name: cell for name, cell in cells.items() if cell.pattern in PATTERNS}


CELLS = _cells()


@pytest.mark.sampled(every=4)
@pytest.mark.matrix
@pytest.mark.parametrize("name", CELLS)
def test_gradients(ranks2: Any, name: str) -> None:
    cell = CELLS[name]
    outcomes = ranks2.run(train, cell)
    check(cell, [outcome for outcome, _ in outcomes])
    for _, norm_error in outcomes:
        assert norm_error <= {"32": 2e-6, "bf16": 1.5e-2, "16": 2e-3}[cell.kind]


def _by_name(name: str) -> list[str]:
    run = fabric(name)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    before = net.weight.detach().clone()
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.5))
    for _ in range(2):
        run.backward(model(torch.full((2, 4), float(run.global_rank))).sum())
    optimizer.step()
    (weight, *_) = trained_weights(net, model._forward_module)
    torch.testing.assert_close(weight, before - 0.5 * 2 * 1.0)  # the mean of 0 and 2 rows, twice
    return [type(run.strategy).__name__, str(run.strategy.stage)]


@pytest.mark.parametrize("name", [f"zeroplus_stage{stage}" for stage in STAGES] + ["zeroplus_stage3_offload"])
def test_names(ranks2: Any, name: str) -> None:
    assert ranks2.run(_by_name, name) == [["ZeroPlusFabricStrategy", name[14]]] * 2


class _Net(nn.Module):
    """A module whose constructor touches its children, to be built under ``fabric.init_module()``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)
        nn.init.ones_(self.second.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def _steps(run: L.Fabric, model: Any, optimizer: Any, count: range) -> None:
    for step in count:
        generator = torch.Generator().manual_seed(10 * step + run.global_rank)
        for _ in range(2):
            x = torch.randn(4, 8, generator=generator)
            run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _save_and_load(directory: str, stage: int) -> bool:
    def set_up(seed: int) -> tuple[L.Fabric, Any, Any]:
        run = fabric(zp.ZeroPlusFabricStrategy(stage, config={"zero_optimization": _PARTITION_ALL}))
        with run.init_module():
            net = _Net(seed)
        return run, *run.setup(net, torch.optim.AdamW(net.parameters(), 0.01))

    path = Path(directory, "saved")
    run, model, optimizer = set_up(0)
    _steps(run, model, optimizer, range(2))
    run.save(path, {"model": model, "optimizer": optimizer, "at": 2})
    _steps(run, model, optimizer, range(2, 4))
    want = trained_weights(model.module, model._forward_module)

    run, model, optimizer = set_up(1)
    state = {"model": model, "optimizer": optimizer, "at": 0}
    run.load(path, state)
    _steps(run, model, optimizer, range(state["at"], 4))
    got = trained_weights(model.module, model._forward_module)
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


_PARTITION_ALL = {"stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize("stage", STAGES)
def test_save_and_load(ranks2: Any, tmp_path: Path, stage: int) -> None:
    assert ranks2.run(_save_and_load, str(tmp_path), stage) == [True, True]


def _no_model() -> None:
    run = fabric("zeroplus_stage2")
    assert not isinstance(run.strategy, DeepSpeedStrategy), "Fabric treats all of these in its own way"
    net = nn.Linear(2, 1)
    loss = run.setup(net)(torch.ones(1, 2)).sum()
    with pytest.raises(RuntimeError, match=r"No model was set up to be trained.*fabric\.setup\(model, optimizer\)"):
        run.backward(loss)
    assert net.weight.grad is None
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"those of no module.*`model, optimizer = fabric\.setup"):
        run.setup_optimizers(torch.optim.SGD(nn.Linear(2, 1).parameters(), 1.0))
    model, _ = run.setup(net, optimizer)
    both = torch.optim.SGD([*net.parameters(), *run.setup(other := nn.Linear(1, 1)).parameters()], 1.0)
    with pytest.raises(RuntimeError, match="those of 2 modules.*give each model its own optimizer"):
        run.setup_optimizers(both)
    assert other is not None
    late = run.setup_module(nn.Linear(1, 1))
    late(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="'weight' has a gradient from before"):
        run.setup_optimizers(torch.optim.SGD(late.parameters(), 1.0))
    with pytest.raises(RuntimeError, match=r"This SGD is not one that trains.*fabric\.setup"):
        run.clip_gradients(model, torch.optim.SGD(net.parameters(), 1.0), max_norm=1.0)
    run.setup_module(net)
    with pytest.raises(RuntimeError, match="No model was set up to be trained"):
        run.strategy.coalesce()


def test_no_model_to_train(ranks2: Any) -> None:
    ranks2.run(_no_model)


def _checkpointing() -> bool:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    config = {"activation_checkpointing": {"cpu_checkpointing": True}}
    run = fabric(zp.ZeroPlusFabricStrategy(2, config=config))
    net = nn.Linear(2, 1)
    run.setup(net, torch.optim.SGD(net.parameters(), 1.0))
    try:
        return checkpointing.CPU_CHECKPOINT
    finally:
        checkpointing.configure(None)


def test_activation_checkpointing_is_configured(ranks2: Any) -> None:
    assert ranks2.run(_checkpointing) == [True, True]


def test_transformer_engine_is_refused() -> None:
    plugin = TransformerEnginePrecision.__new__(TransformerEnginePrecision)
    with pytest.raises(MisconfigurationException, match='TransformerEngine.*precision="bf16-true"'):
        zp.ZeroPlusFabricStrategy(2, precision=plugin)


def test_devices_are_numbered_as_ranks_are() -> None:
    made = zp.ZeroPlusFabricStrategy(2, parallel_devices=[torch.device("cuda", 1)])
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES=1"):
        made._join_with_devices()


def _evaluate(stage: int) -> bool:
    run = fabric(zp.ZeroPlusFabricStrategy(stage, config={"zero_optimization": _PARTITION_ALL}))
    net = _Net()
    x = torch.ones(2, 8)
    want = net(x)
    with torch.no_grad():
        return torch.allclose(run.setup(net)(x), want)


@pytest.mark.parametrize("stage", (0, 3))
def test_without_an_optimizer(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_evaluate, stage) == [True, True]


def _refusals() -> None:
    run = fabric("zeroplus_stage2")
    net = nn.Linear(2, 1)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 1.0))
    loss = model(torch.ones(1, 2)).sum()
    run.backward(loss, inputs=[net.bias], create_graph=True)
    assert net.weight.grad is None and torch.equal(net.bias.grad, torch.ones(1))
    for name in ("max_norm", "clip_val"):
        with pytest.raises(MisconfigurationException, match=rf"{name}=-1"):
            run.clip_gradients(model, optimizer, **{name: -1})
    with pytest.raises(MisconfigurationException, match="backwards=0"):
        run.strategy.coalesce(backwards=0)
    with pytest.raises(RuntimeError, match="This Linear was not set up"):
        run.strategy.coalesce(model=nn.Linear(2, 1))
    run.backward(loss * torch.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        run.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match="not finite"):
        run.clip_gradients(model, optimizer, max_norm=1.0, norm_type=torch.inf)
    assert run.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False) == torch.inf
    optimizer.zero_grad()
    for clip in ({"max_norm": 1.0}, {"clip_val": 1.0}, {"max_norm": 1.0, "norm_type": torch.inf}):
        with run.no_backward_sync(model):
            run.backward(model(torch.ones(1, 2)).sum())
        run.clip_gradients(model, optimizer, **clip)
        with pytest.raises(RuntimeError, match="from within no_sync.*after the last backward"):
            run.backward(model(torch.ones(1, 2)).sum())
        optimizer.zero_grad()
    run.backward(model(torch.ones(1, 2)).sum())


def test_refusals(ranks2: Any) -> None:
    ranks2.run(_refusals)


def _closure() -> float:
    run = fabric("zeroplus_stage2")
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    before = net.weight.detach().clone()
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 1.0))

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        run.backward(loss)
        return 7.0

    result = optimizer.step(closure)
    assert torch.equal(net.weight.detach(), before - 1)
    return result


def test_a_closure(ranks2: Any) -> None:
    assert ranks2.run(_closure) == [7.0, 7.0]


def test_bad_arguments_before_anything() -> None:
    with pytest.raises(MisconfigurationException, match="`stage` must be"):
        zp.ZeroPlusFabricStrategy(stage=4)
    with pytest.raises(MisconfigurationException, match="train_batch_size"):
        zp.ZeroPlusFabricStrategy(config={"train_batch_size": 8})
    with pytest.raises(MisconfigurationException, match="positive `datetime.timedelta`, not 5"):
        zp.ZeroPlusFabricStrategy(timeout=5)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="one of gloo.*not 'glou'"):
        zp.ZeroPlusFabricStrategy(process_group_backend="glou")
    zp.ZeroPlusFabricStrategy(3, config={"zero_optimization": {"offload_param": None}})
    assert not dist.is_initialized()


def _wrong() -> None:
    fabric("zeroplus_stage9")


def test_an_unknown_name(ranks2: Any) -> None:
    with pytest.raises(RankError, match="invalid strategy name"):
        ranks2.run(_wrong)


class _Experts(nn.ModuleDict):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__({name: nn.Linear(8, 8) for name in "abcd"})

    def forward(self, x: torch.Tensor, chosen: str) -> torch.Tensor:
        for name in chosen:
            x = x + torch.tanh(self[name](x))
        return x.square().mean()


def _branches(stage: int, threshold: int) -> float:
    zero = {"stage3_param_persistence_threshold": threshold, "reduce_bucket_size": 50}
    run = fabric(zp.ZeroPlusFabricStrategy(stage, config={"zero_optimization": zero}))
    net, plain = _Experts(), _Experts()
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for at in range(16):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * at + run.global_rank))
        chosen = "ab" if at < 8 else "abcd"[(at + run.global_rank) % 4] + "d"
        loss = model(x, chosen)
        assert run.all_reduce(loss.detach()).isfinite()  # a collective, which a rank comes to before another
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

        plain(x, chosen).backward()
        for param in plain.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.data -= 0.1 * grad / run.world_size
            param.grad = None
    run.barrier()
    with zp.gathered(net):
        pairs = zip(net.parameters(), plain.parameters(), strict=True)
        return max(float((got - want).detach().abs().max()) for got, want in pairs)


@pytest.mark.parametrize(
    ("stage", "threshold"), [(0, 0), (1, 0), (2, 0), (3, 0), pytest.param(3, 8, id="3-biases stay whole")]
)
def test_ranks_that_take_different_branches(ranks2: Any, stage: int, threshold: int) -> None:
    assert max(ranks2.run(_branches, stage, threshold)) < 1e-6


def _torn_down(stage: int) -> tuple[list[str], bool, bool]:
    """What is still there after `teardown`; whether the weights are as they were; whether `linear` is as before."""
    zero, linear = {"stage3_param_persistence_threshold": 0}, functional.linear
    run = fabric(zp.ZeroPlusFabricStrategy(stage, config={"zero_optimization": zero}))
    net, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    evaluated = run.setup(other)
    run.backward(evaluated(model(torch.ones(2, 4))).sum())
    optimizer.step()
    state = {name: whole.clone() for name, whole in net.state_dict().items()}
    with patch.object(run.strategy.cluster_environment, "teardown"):  # it would end that of the other tests
        run.strategy.teardown()
    alike = all(torch.equal(param, state[name]) for name, param in net.named_parameters())
    left = {"net": ref(net), "model": ref(model), "strategy": ref(run.strategy), "engine": ref(model._forward_module)}
    left |= {"other": ref(other), "its engine": ref(evaluated._forward_module)}
    del run, net, other, model, optimizer, evaluated
    gc.collect()
    return [name for name, made in left.items() if made() is not None], alike, functional.linear is linear


@pytest.mark.parametrize("stage", STAGES)
def test_a_teardown_frees_the_engines_and_leaves_whole_weights(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_torn_down, stage) == [([], True, True)] * 2


def _trains_and_drops(stage: int, sums: Any = None) -> dict[str, Any]:
    precision = "32-true" if sums is None else "bf16-true"
    run = fabric(zp.ZeroPlusFabricStrategy(stage, accumulate_dtype=sums, config=_PARTITIONED), precision)
    net = nn.Linear(4, 4)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    run.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return {"net": ref(net), "engine": ref(model._forward_module), "strategy": ref(run.strategy)}


_PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def _left_with_sums(stage: int) -> list[str]:
    """What is left of a Fabric that is only dropped, with sums in fp32 of gradients in bf16."""
    left = _trains_and_drops(stage, "float32")
    gc.collect()
    return [name for name, made in left.items() if made() is not None]


@pytest.mark.parametrize("stage", STAGES[:3])
def test_a_dropped_engine_that_sums_in_fp32_is_freed(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_left_with_sums, stage) == [[]] * 2


def _dropped(stage: int) -> tuple[list[str], bool, set[Any]]:
    """What is left of a Fabric that is only dropped; whether `linear` is as before; the shapes of kept nodes."""
    linear = functional.linear
    left = _trains_and_drops(stage)
    gc.collect()
    shapes = set()
    if stage == 3:
        run = fabric(zp.ZeroPlusFabricStrategy(3, config=_PARTITIONED))
        made = []
        for net in (nn.Linear(5, 5), nn.Linear(5, 5)):  # the next engine frees it, and not one that is needed
            made.append(run.setup(net, torch.optim.SGD(net.parameters(), 0.1)))
        nodes = made[0][0]._forward_module.gradient_accumulation._nodes
        shapes = {tuple(node._input_metadata[0].shape) for node in nodes}
        with patch.object(run.strategy.cluster_environment, "teardown"):
            run.strategy.teardown()
    return [name for name, made in left.items() if made() is not None], functional.linear is linear, shapes


@pytest.mark.parametrize("stage", STAGES)
def test_a_dropped_engine_is_freed(ranks2: Any, stage: int) -> None:
    """At stage 3, by the next engine: torch keeps the parameters until then, and they know the engine."""
    assert ranks2.run(_dropped, stage) == [([], True, {(5, 5), (5,)} if stage == 3 else set())] * 2
