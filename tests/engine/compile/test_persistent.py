"""Parameters that stay gathered, as DeepCompile's native extension keeps them: never stale after a step or a load.

The extension needs CUDA. Here a handle in Python has its rules, within the class that we put around the extension.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.compile import util
from torch import Tensor

from lightning_zeroplus.engine.compile import cpu_backend, native_backend
from lightning_zeroplus.engine.compile.session import CompileSession
from tests.engine.compile.models import Spec, batch, build
from tests.engine.compile.test_skipped_frames import ROUNDING
from tests.engine.compile.training import LR, compiled_engine, full

_WHOLE = Spec(("compiled",))


class _Extension(cpu_backend.CpuHandle):
    """What decides in ``deepspeed/ops/csrc/compile/z3.cpp`` whether a parameter is gathered anew.

    What is gathered is valid until the end of a backward of a graph that has the parameter. Python can drop what does
    not persist, and nothing else.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._graphs: dict[int, list[int]] = {}
        self._valid: set[int] = set()
        self._updated = False

    def register_graph_z3(self, graph_id: int, ids: Iterable[int]) -> None:
        self._graphs[graph_id] = list(ids)

    def reset(self) -> None:
        super().reset()
        self._graphs.clear()

    def start_backward(self, update: bool) -> None:
        self._updated = update

    def end_backward(self, deps: Any, graph_id: int, release_reduce_buckets: bool) -> None:
        if self._updated:
            self._valid.difference_update(self._graphs[graph_id])

    def allgather_param(self, a: Tensor, graph_id: int, id: int, dtype: torch.dtype | None = None) -> Tensor:
        if id not in self._valid:
            self._gathered.pop(id, None)
        self._valid.add(id)
        return super().allgather_param(a, graph_id, id, dtype)

    def invalidate_gathered_param(self, id: int) -> None:
        if id not in self._persistent:
            super().invalidate_gathered_param(id)

    def clear_all_gathered_params(self) -> None:
        for id in set(self._gathered) - self._persistent:
            self._gathered.pop(id)

    def invalidate(self) -> None:
        raise AssertionError("the extension has no such function")


@contextmanager
def _as_native() -> Iterator[None]:
    """Sessions get the class around the extension, with the extension's rules."""

    def make(self: CompileSession) -> Any:
        extension = _Extension(self._receive, self.meter)
        cpu_backend.use(extension)
        self._patches.call_later(partial(cpu_backend.use, None))
        util.dc_handle = native_backend.NativeHandle(extension, self._receive, self._patches)
        return util.dc_handle

    with patch.object(CompileSession, "_make_handle", make):
        yield


def _train(folder: str) -> tuple[float, float, float]:
    """The largest error of a parameter, its movement, and how far outputs are off after a load."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = build(_WHOLE)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    with _as_native(), compiled_engine(model, 3) as engine:

        def output() -> Tensor:
            with torch.no_grad():
                return engine(*batch(100, rank)).detach().clone()

        for step in range(3):
            engine.optimizer.zero_grad()
            engine.backward(engine(*batch(step, rank)))
            output()  # gathers, between the last backward and the step
            engine.step()
            if step == 0:
                for param in model.parameters():
                    util.dc_handle.set_persistent(param.ds_id)
            optimizer.zero_grad()
            for other in range(world):
                (reference(*batch(step, other)) / world).backward()
            optimizer.step()
        trained = {name: full(param) for name, param in model.named_parameters()}
        saved = output()
        engine.save_checkpoint(folder)
        engine.optimizer.zero_grad()
        engine.backward(engine(*batch(3, rank)))
        engine.step()
        assert not torch.equal(output(), saved)
        engine.load_checkpoint(folder)
        after_load = float((output() - saved).abs().max())
    wanted = dict(reference.named_parameters())
    error = max(float((trained[name] - wanted[name]).abs().max()) for name in wanted)
    return error, max(float((trained[name] - start[name]).abs().max()) for name in start), after_load


def test_what_stays_gathered_follows_steps_and_loads(ranks2: Any, tmp_path: Path) -> None:
    for error, moved, after_load in ranks2.run(_train, str(tmp_path)):
        assert error <= ROUNDING < moved and after_load == 0
