"""Checkpoints without frozen weights: what is in them, where they resume, and when that is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

import lightning_zeroplus as zp
from lightning_zeroplus.checkpoint.data_only import load_data, read_metadata
from lightning_zeroplus.checkpoint.saving.frozen import FROZEN, fingerprints
from lightning_zeroplus.testing import RankPool
from tests.checkpoint import model
from tests.checkpoint.model import Tied

KINDS = (0, 1, 2, 3, "fsdp")
FROZEN_NAMES = {"frozen.weight", "frozen.bias"}
WIDTH = 64
BEFORE, AFTER = 3, 6


class _Adapted(Tied):
    """A frozen layer that is larger than all that is trained."""

    def __init__(self, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(seed, width=WIDTH, **kwargs)

    def on_train_start(self) -> None:
        pass


class _Teacher(_Adapted):
    """Its frozen bias is written in training."""

    def on_train_batch_start(self, *args: Any) -> None:
        with zp.gathered(self.frozen), torch.no_grad():
            self.frozen.bias.mul_(0.5).add_(0.5)


class _Saves(Callback):
    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _strategy(kind: int | str, save_frozen: bool) -> Any:
    if kind == "fsdp":
        return zp.ZeroPlusFSDPStrategy(save_frozen=save_frozen)
    return model.strategy(int(kind), save_frozen=save_frozen)


def _fit(
    kind: int | str, steps: int, path: str | None = None, save: str = "", module: Any = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Whole weights and buffers after the fit."""
    save_frozen = kwargs.pop("save_frozen", False)
    module = module or _Adapted(seed=0)
    callbacks = [_Saves(save, steps)] if save else []
    run = model.trainer(_strategy(kind, save_frozen), max_steps=steps, callbacks=callbacks, **kwargs)
    run.fit(module, model.loader(), ckpt_path=path)
    return {name: value.clone() for name, value in module.state_dict().items()}


def _save(folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in KINDS:
        found[kind] = _fit(kind, BEFORE, save=f"{folder}/{kind}"), _fit(kind, AFTER)
    for kind in (2, "fsdp"):
        _fit(kind, BEFORE, save=f"{folder}/{kind}-all", save_frozen=True)
    return found


@pytest.fixture(scope="module")
def saved(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks(2).run(_save, str(folder))[0]


def _stored(path: Path) -> dict[str, Any]:
    rest = load_data(path / "meta.pt")
    found: dict[str, Any] = rest[FROZEN] if FROZEN in rest else rest["zeroplus"]["frozen"]
    return found


def _names(path: Path) -> set[str]:
    return {name for name in read_metadata(path).state_dict_metadata if "frozen" in name}


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def test_frozen_weights_are_left_out_and_their_fingerprints_are_the_same_everywhere(saved: Any) -> None:
    folder, found = saved
    want = fingerprints({name: found[0][0][name] for name in FROZEN_NAMES}, torch.device("cpu"))
    for kind in KINDS:
        assert not {name for name in _names(folder / str(kind)) if "optim" not in name}, kind
        got = {name: (dtype, tuple(shape), bits) for name, (dtype, shape, bits) in _stored(folder / str(kind)).items()}
        assert got == want, kind
    for kind in (2, "fsdp"):
        smaller = _bytes(folder / f"{kind}-all") - _bytes(folder / str(kind))
        assert smaller >= 4 * (WIDTH * WIDTH + WIDTH)


def _resume(folder: str, pairs: list[Any], steps: int) -> list[dict[str, Tensor]]:
    # Only the frozen weights are the same without the checkpoint.
    found = []
    for source, kind in pairs:
        module = _Adapted(seed=7)
        module.frozen.load_state_dict(_Adapted(seed=0).frozen.state_dict())
        found.append(_fit(kind, steps, f"{folder}/{source}", module=module))
    return found


def _difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize(
    ("world_size", "pairs"),
    [
        (2, [(0, 3), (1, 2), (2, 0), (3, 1), ("fsdp", "fsdp")]),
        pytest.param(4, [(3, 3), (1, 2), ("fsdp", "fsdp")], marks=pytest.mark.slow),
    ],
)
def test_resumes_at_another_stage_and_world_size(ranks: Any, saved: Any, world_size: int, pairs: list[Any]) -> None:
    folder, found = saved
    for steps, bound in ((BEFORE, 0.0), (AFTER, 1e-6)):
        for answers in ranks(world_size).run(_resume, str(folder), pairs, steps):
            for (source, kind), got in zip(pairs, answers, strict=True):
                want = found[source][steps == AFTER]
                assert _difference(got, want) <= bound, (source, kind)
    assert _difference(found[3][0], found[3][1]) > 1e-3, "nothing was trained"


def _refused(folder: str) -> dict[Any, str]:
    said: dict[Any, str] = {}
    for kind in KINDS:
        source = f"{folder}/{kind}"
        for what in ("values", "dtype"):
            module = _Adapted(seed=0)
            if what == "values" and kind in (0, 3):
                module.frozen.bias.data[-1] += 1e-3
            elif what == "values":
                module.frozen.weight.data[[0, 1]] = module.frozen.weight.data[[1, 0]]  # the same bits elsewhere
            else:
                module.frozen.double()
            before = {name: value.clone() for name, value in module.state_dict().items()}
            try:
                _fit(kind, AFTER, source, module=module)
            except RuntimeError as error:
                said[kind, what] = str(error)
            if kind in (0, 1, 2):
                assert _difference(module.state_dict(), before) == 0, "something was loaded"
    return said


def test_other_frozen_weights_are_refused_by_name_on_every_rank(ranks2: Any, saved: Any) -> None:
    for said in ranks2.run(_refused, str(saved[0])):
        for kind in KINDS:
            name = "frozen.bias" if kind in (0, 3) else "frozen.weight"
            assert f"{name} (other values)" in said[kind, "values"], kind
            assert "float64 (64,) instead of float32 (64,)" in said[kind, "dtype"], kind
            assert "Nothing has been loaded" in said[kind, "values"] and "save_frozen=False" in said[kind, "values"]


def _written(folder: str) -> list[Any]:
    found = []
    for kind in (1, 3, "fsdp"):
        path = f"{folder}/{kind}"
        want = _fit(kind, BEFORE, save=path, module=_Teacher())
        again = f"{folder}/{kind}-again"
        # Nothing is written in this fit, and the module's own weights are those of the start.
        got = _fit(kind, AFTER, path)
        _fit(kind, BEFORE + 1, path, save=again)
        found.append((kind, want, got))
    return found


def test_frozen_weights_that_were_written_are_saved(ranks2: Any, tmp_path: Path) -> None:
    for answers in ranks2.run(_written, str(tmp_path)):
        for kind, want, got in answers:
            assert torch.equal(got["frozen.bias"], want["frozen.bias"]), kind
            assert float(want["frozen.bias"].mean()) > 0.5, kind
            for name in (kind, f"{kind}-again"):
                stored = {each for each in _names(tmp_path / str(name)) if "optim" not in each}
                assert len(stored) == 1 and stored.pop().endswith("frozen.bias")
                assert _stored(tmp_path / str(name)).keys() == {"frozen.weight"}


def test_export_says_what_is_missing(saved: Any, tmp_path: Path) -> None:
    for kind in (3, "fsdp"):
        with pytest.raises(ValueError, match=r"2 frozen weights are not in it, frozen\.\w+, frozen.*save_frozen=True"):
            zp.export(saved[0] / str(kind), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def _averaged() -> list[str]:
    said = []
    for kind in (2, "fsdp"):
        run = model.trainer(_strategy(kind, False), max_steps=1, callbacks=[WeightAveraging()])
        with pytest.raises(Exception, match="save_frozen=False") as caught:
            run.fit(_Adapted(), model.loader())
        said.append(str(caught.value))
    return said


def test_what_cannot_leave_weights_out_is_refused(ranks2: Any) -> None:
    for said in ranks2.run(_averaged):
        assert all("zp.EMA" in each for each in said)
    with pytest.raises(Exception, match="save_distributed_checkpoint=True"):
        zp.ZeroPlusFSDPStrategy(save_frozen=False, save_distributed_checkpoint=False)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.int8, torch.bool]
)
def test_a_fingerprint_tells_places_bits_dtypes_and_shapes_apart(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    weight = torch.randint(0, 2, (6, 4), generator=torch.Generator().manual_seed(1)).to(dtype)

    def of(value: Tensor) -> Any:
        return fingerprints({"weight": value}, cpu)["weight"]

    changed, moved = weight.clone(), weight.flip(0)
    changed[5, 3] = 1 - int(weight[5, 3].real) if dtype.is_complex else ~weight[5, 3] if dtype == torch.bool else 7
    found = [of(weight), of(changed), of(moved), of(weight.view(4, 6)), of(weight.real.to(torch.float16))]
    assert len(set(found)) == len(found)
    assert of(weight.clone()) == of(weight.t().contiguous().t()) == found[0]
