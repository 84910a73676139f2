"""What ``on_save_checkpoint``, ``state_dict()`` and ``on_load_checkpoint`` do to the weights counts, as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

import lightning_zeroplus as zp
from tests.support.training import Classifier, loader, trainer, weights, zero_plus


class _Plain(Classifier):
    """An optimizer without state, so that a resumed fit shows the weights alone; or AdamW."""

    def __init__(self, seed: int = 0, optimizer: str = "sgd") -> None:
        super().__init__(scheduler=None, seed=seed, optimizer=optimizer)
        self.strict_loading = False


class _HeadOnly(_Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name.startswith("net.2")}


class _HeadOnlyByStateDict(_Plain):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name.startswith("net.2")}


class _Renaming(_Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("net.", "model."): value for name, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("model.", "net."): value for name, value in state.items()}


class _Swapping(_Plain):
    """Drops a weight, and brings one of its own."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert state["net.0.weight"].shape == (32, 8) and state["net.0.weight"].dtype == torch.float32
        del state["net.0.weight"]
        state["net.2.bias"] = torch.arange(4.0)


MODULES = {each.__name__: each for each in (_Plain, _HeadOnly, _HeadOnlyByStateDict, _Renaming, _Swapping)}


class _AtTheEnd(pl.Callback):
    """Saves while parameters are still partitioned."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _strategy(stage: int | str | None) -> Any:
    return {None: "ddp", "fsdp": "zeroplus_fsdp"}.get(stage) or zero_plus(int(stage))  # type: ignore[arg-type]


def _save(stage: int | str | None, kind: str, path: str, optimizer: str) -> Any:
    run = trainer(_strategy(stage), max_epochs=1, callbacks=[_AtTheEnd(path)])
    module = MODULES[kind](optimizer=optimizer)
    try:
        run.fit(module, loader())
    except RuntimeError as error:
        return str(error)
    return weights(module)


def _resume(stage: int | str | None, kind: str, path: str, optimizer: str, fit: bool) -> Any:
    run = trainer(_strategy(stage), max_epochs=2)
    module = MODULES[kind](seed=5, optimizer=optimizer)
    try:
        if fit:
            run.fit(module, loader(), ckpt_path=path)
        else:
            run.validate(module, loader(64), ckpt_path=path, verbose=False)
    except RuntimeError as error:
        return str(error)
    return weights(module)


SAVED = ["_HeadOnly", "_HeadOnlyByStateDict", "_Renaming"]


@pytest.mark.sampled
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_saving_hooks_are_honoured(ranks2: Any, tmp_path: Path, saved: str, stage: int) -> None:
    """Resumed, and loaded to validate, a module has the weights that DDP gives it."""
    loads = saved if saved == "_Renaming" else "_Plain"
    ours, ddp = str(tmp_path / "ours"), str(tmp_path / "ddp.ckpt")
    want = ranks2.run(_save, None, saved, ddp, "sgd")[0]
    got = ranks2.run(_save, stage, saved, ours, "sgd")[0]
    if stage == 3 and saved == "_Renaming":
        assert "empty rest of a partitioned parameter" in got and not Path(ours).exists()
        return
    assert float((got - want).norm()) <= 1e-6
    for fit in (True, False):
        for fresh in (stage, 3 - stage):
            wanted = ranks2.run(_resume, None, loads, ddp, "sgd", fit)
            for found, weight in zip(ranks2.run(_resume, fresh, loads, ours, "sgd", fit), wanted, strict=True):
                assert float((found - weight).norm() / weight.norm()) <= 1e-6
                if saved != "_Renaming":
                    assert float((found - want).norm()) > 0.1, "what is not saved is not loaded"
    zp.export(ours, tmp_path / "weights.safetensors")
    names = load_file(tmp_path / "weights.safetensors").keys()
    expected = "model." if saved == "_Renaming" else "net.2."
    assert names and all(name.startswith(expected) for name in names)


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 3])
def test_loading_hooks_are_honoured(ranks2: Any, tmp_path: Path, stage: int, optimizer: str) -> None:
    ours, ddp = str(tmp_path / "ours"), str(tmp_path / "ddp.ckpt")
    ranks2.run(_save, None, "_Plain", ddp, optimizer)
    ranks2.run(_save, stage, "_Plain", ours, optimizer)
    for fit in (True, False):
        want = ranks2.run(_resume, None, "_Swapping", ddp, optimizer, fit)[0]
        plain = ranks2.run(_resume, None, "_Plain", ddp, optimizer, fit)[0]
        for found in ranks2.run(_resume, stage, "_Swapping", ours, optimizer, fit):
            assert float((found - want).norm() / want.norm()) <= 1e-6
        assert float((want - plain).norm()) > 0.1


class _OldNames(_Plain):
    """Loads what was saved under other names, and a bias with another sign, by hooks of ``load_state_dict``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.strict_loading = True
        self.register_load_state_dict_pre_hook(_rename)
        self.net.register_load_state_dict_pre_hook(_negate)


def _rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}model.")]:
        state[name.replace("model.", "net.")] = state.pop(name)


def _negate(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert all(name.startswith(prefix) for name in state), "a part gets what is below it"
    state[f"{prefix}2.bias"] = -state[f"{prefix}2.bias"]


class _Overrides(_Plain):
    """The same by an override of `load_state_dict`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.strict_loading = True

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {name.replace("model.", "net."): value for name, value in state_dict.items()}
        state["net.2.bias"] = -state["net.2.bias"]
        return super().load_state_dict({**state, "of another model": state["net.2.bias"]}, strict=False)


class _NegatedLinear(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[f"{prefix}bias"] = -state_dict[f"{prefix}bias"]
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _PartOverrides(_Plain):
    """A part overrides `_load_from_state_dict`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net[2].__class__ = _NegatedLinear
        self.register_load_state_dict_pre_hook(_rename)


class _Unheard(_Plain):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Does not call super()."""


LOADS = (_OldNames, _Overrides, _PartOverrides)
MODULES.update({each.__name__: each for each in (*LOADS, _Unheard)})


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("loads", [each.__name__ for each in LOADS])
@pytest.mark.parametrize("source", ["ddp", "own"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "fsdp"])
def test_what_load_state_dict_changes_counts_once(
    ranks2: Any, tmp_path: Path, stage: int | str, source: str, loads: str
) -> None:
    """Resumed, and loaded to validate, from a file of DDP, and from a folder."""
    kind = "_Plain" if stage == "fsdp" else "_Renaming"
    ddp, own = str(tmp_path / "ddp.ckpt"), str(tmp_path / "own")
    ranks2.run(_save, None, kind, ddp, "sgd")
    if source == "own":
        ranks2.run(_save, "fsdp" if stage == "fsdp" else 2, kind, own, "sgd")
    for fit in (True, False):
        want = ranks2.run(_resume, None, loads, ddp, "sgd", fit)[0]
        for found in ranks2.run(_resume, stage, loads, ddp if source == "ddp" else own, "sgd", fit):
            assert float((found - want).norm() / want.norm()) <= 1e-6
        assert float((want - ranks2.run(_resume, None, "_Renaming", ddp, "sgd", fit)[0]).norm()) > 0.01


@pytest.mark.parametrize("stage", [2, "fsdp"])
def test_an_override_that_does_not_call_super_is_refused(ranks2: Any, tmp_path: Path, stage: int | str) -> None:
    path = str(tmp_path / "saved")
    ranks2.run(_save, stage, "_Plain", path, "sgd")
    for message in ranks2.run(_resume, stage, "_Unheard", path, "sgd", True):
        assert "`_Unheard.load_state_dict` does not call `super().load_state_dict()`" in message


class _Renamed(_Plain):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.other, self.net = self.net, torch.nn.Identity()
        self.strict_loading = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)


def _resume_another(path: str) -> str:
    run = trainer("zeroplus_fsdp", max_epochs=2)
    with pytest.raises(RuntimeError) as caught:
        run.fit(_Renamed(optimizer="adamw"), loader(), ckpt_path=path)
    return str(caught.value)


def test_states_of_parameters_that_the_module_does_not_have_are_refused(ranks2: Any, tmp_path: Path) -> None:
    """They were dropped, silently."""
    ranks2.run(_save, "fsdp", "_Plain", str(tmp_path / "saved"), "adamw")
    for message in ranks2.run(_resume_another, str(tmp_path / "saved")):
        assert "has an optimizer's state of 'net." in message and "which the module does not have" in message
