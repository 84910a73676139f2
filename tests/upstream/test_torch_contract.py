"""What ``gradients`` and ``fsdp`` override or read inside torch is there; a torch that has renamed it is refused."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import lightning_zeroplus as zp
from lightning_zeroplus.doctor.checks import probes
from lightning_zeroplus.engine.build import build_engine
from lightning_zeroplus.internals import torch as internals
from lightning_zeroplus.internals.probe import Probe
from lightning_zeroplus.internals.torch import FSDP, GRADIENTS, UnsupportedTorchError, check_imports, check_torch


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    check_torch.cache_clear()
    check_imports.cache_clear()
    yield
    check_torch.cache_clear()
    check_imports.cache_clear()


@pytest.mark.parametrize("each", (*GRADIENTS, *FSDP), ids=lambda each: f"{each.feature}, {each.owner}")
def test_the_installed_release_has_it(each: Probe) -> None:
    assert each.missing() == []


@pytest.mark.parametrize("each", (*GRADIENTS, *FSDP), ids=lambda each: f"{each.feature}, {each.owner}")
def test_each_name_is_looked_for(each: Probe) -> None:
    """No probe is satisfied by any name whatever."""
    names = {*each.methods.split(), *each.attributes.split(), *(called for _, called in each.calls)}
    names = {name.rpartition("|")[2] for name in names}
    other = each._replace(
        methods=re.sub(r"(\w+)", r"other_\1", each.methods),
        attributes=re.sub(r"(\w+)", r"other_\1", each.attributes),
        calls=tuple((caller, f"other_{called}") for caller, called in each.calls),
    )
    assert {lost.rpartition("other_")[2] for lost in other.missing()} == names


def _loses(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.delattr(owner, name)


def _calls_no_more(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, lambda *args: None)


LATER = {
    "a method is renamed": (_loses(FSDPParamGroup, "_to_unsharded"), r"FSDPParamGroup\._to_unsharded"),
    "a method is not called": (
        _calls_no_more(FSDPParamGroup, "wait_for_unshard"),
        "wait_for_unshard -> _to_unsharded",
    ),
    "the end of a backward": (_loses(FSDPState, "_root_post_backward_final_callback"), r"FSDPState\._root_post_back"),
    "a class is gone": (_loses(_fsdp_common, "HSDPMeshInfo"), r"no torch\.\S+\.HSDPMeshInfo, which 'replicas'"),
}


@pytest.mark.parametrize("change", LATER)
def test_fsdp2_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    make, lost = LATER[change]
    make(monkeypatch)
    with pytest.raises(UnsupportedTorchError, match=f"torch {re.escape(torch.__version__)} .*{lost}"):
        zp.ZeroPlusFSDPStrategy()
    zp.ZeroPlusStrategy(2)  # does not need it


def test_all_strategies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks would not meet before a collective that the user calls, and some would wait for ever."""
    _calls_no_more(distributed_c10d, "broadcast")(monkeypatch)
    with pytest.raises(UnsupportedTorchError, match="broadcast -> _rank_not_in_group"):
        zp.ZeroPlusFSDPStrategy()
    net = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedTorchError, match="broadcast -> _rank_not_in_group"):
        build_engine(net, torch.optim.SGD(net.parameters(), 0.1), {"zero_optimization": {"stage": 1}})
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


@pytest.mark.parametrize(("package", "needed"), [("gradients", GRADIENTS), ("fsdp", FSDP)])
def test_a_missing_class_is_named_on_import(
    monkeypatch: pytest.MonkeyPatch, package: str, needed: tuple[Probe, ...]
) -> None:
    """Where the import of a name from torch would fail, the error names the release and the remedy instead."""
    module = importlib.import_module(f"lightning_zeroplus.{package}")
    gone = needed[0]._replace(owner="torch.distributed.Renamed")
    monkeypatch.setattr(internals, package.upper(), (gone,))
    with pytest.raises(UnsupportedTorchError, match=r"has no torch\.distributed\.Renamed.*doctor"):
        importlib.reload(module)
    monkeypatch.undo()
    importlib.reload(module)


def test_doctor_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _loses(FSDPParamGroup, "_to_unsharded")(monkeypatch)
    (problem,) = [finding for finding in probes() if finding.status == "problem"]
    assert problem.name == "torch under zeroplus_fsdp" and "FSDPParamGroup._to_unsharded" in problem.detail
