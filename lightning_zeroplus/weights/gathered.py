"""``zp.gathered``: whole weights, to read and to write, under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zeroplus.weights import agreement
from lightning_zeroplus.weights.partitioned.partition import (
    gather,
    note_kept,
    own_slice,
    partition_alike,
    serve_others,
    write,
)

_Result = TypeVar("_Result")
_Weights = TypeVar("_Weights", nn.Module, nn.Parameter, Iterable[nn.Parameter])
_TOGETHER = "zp.gathered()"
_LEFT = "the end of zp.gathered()"


class WholeWeights(Protocol):
    """Weights of one kind, which are whole between :meth:`show` and :meth:`hide`."""

    def show(self) -> None:
        """Make the weights whole; a collective."""

    def hide(self, writer: int | None) -> None:
        """Take over what was written; a collective.

        Args:
            writer: The rank whose values count; None: all ranks have written the same.
        """

    def give_up(self) -> None:
        """Take over what this rank has written, after an exception that other ranks may not have seen."""


class WholeOfSharded(WholeWeights, Protocol):
    """The kind for parameters that FSDP2 has sharded.

    Attributes:
        whole: The parameters in full shape.
    """

    whole: list[nn.Parameter]


_OF_SHARDED: list[Callable[[Any], WholeOfSharded]] = []


def gather_sharded_with(kind: Callable[[Any], WholeOfSharded]) -> None:
    """Say how parameters that FSDP2 has sharded become whole: nothing here knows FSDP2.

    Args:
        kind: Takes a module, or parameters.
    """
    _OF_SHARDED[:] = [kind]


@contextmanager
def gathered(module_or_params: _Weights, *, writer: int | None = None) -> Iterator[Any]:
    """Give whole weights, to read and to write: at every ZeRO stage, under FSDP2, DDP and in a plain process.

    ::

        with zp.gathered(self.teacher):
            self.teacher.load_state_dict(self.student_copy)
            norm = self.teacher.weight.norm()

    The next forward and the next optimizer step use what is written within, in whatever way: in-place operations,
    ``param.data = ...``, ``load_state_dict``, ``torch.nn.init``. Within, ``state_dict()``, ``copy.deepcopy`` and
    ``torch.save`` give whole tensors and ordinary modules. If the weights are whole anyway, nothing happens.

    All ranks must enter it. It may be nested, and used within a ``training_step`` or a ``coalesce()``. An
    ``optimizer.step()`` within is refused. If the body raises, what was written stays written.

    Args:
        module_or_params: A module, with its submodules; a parameter; or an iterable of parameters. Under FSDP2 a
            sharded parameter cannot become whole in place: a module gets whole parameters, and for parameters the whole
            ones are what is yielded.
        writer: The rank whose values count. None: all ranks write the same, as they do under DDP.

    Yields:
        The module; or the parameter, or a list of parameters, in full shape and in their own dtype.

    Raises:
        ValueError: If an argument is something else, or differs between ranks; on exit, if a parameter was given
            another shape.
        RuntimeError: If a rank comes alone (after the time limit of the process group), or if another rank raises in
            the body; on exit, if ranks have written different values without a ``writer``: the weights then have the
            values from before.
    """
    params = _resolve(module_or_params, writer)
    kinds: list[WholeWeights] = []
    managed = [param for param in params if hasattr(param, "ds_id")]
    if managed:
        kinds.append(_Stage3Weights(managed))
    result: Any = module_or_params if isinstance(module_or_params, nn.Module) else params
    if any(hasattr(param, "to_local") for param in params):
        (of_sharded,) = _OF_SHARDED
        sharded = of_sharded(module_or_params if isinstance(module_or_params, nn.Module) else params)
        kinds.append(sharded)
        if not isinstance(module_or_params, nn.Module):
            result = sharded.whole
    others = [param for param in params if not hasattr(param, "ds_id") and not hasattr(param, "to_local")]
    if others and writer is not None and agreement.is_distributed():
        kinds.append(_ReplicatedWeights(others))
    if kinds:
        shapes = [tuple(getattr(param, "ds_shape", param.shape)) for param in params]
        serve_others(params)
        agreement.meet(_TOGETHER, f"{len(shapes)} parameters of shapes {shapes}, writer={writer}")
    with _shown(kinds, writer):
        yield result[0] if isinstance(module_or_params, nn.Parameter) else result


def collectively(param: Any, function: Callable[[], _Result]) -> _Result:
    """Run ``function`` on all ranks while ``param`` is gathered, and keep rank 0's values of it."""
    with gathered([param], writer=0):
        return function()


@contextmanager
def _shown(kinds: list[WholeWeights], writer: int | None) -> Iterator[None]:
    with ExitStack() as undo:
        for kind in kinds:
            kind.show()
            undo.callback(kind.give_up)
        try:
            yield
        except BaseException:
            if kinds:
                agreement.abandon(_LEFT)
            raise
        if kinds:
            agreement.meet(_LEFT, "")
        undo.pop_all()
    for kind in kinds:
        kind.hide(writer)


def _resolve(module_or_params: Any, writer: Any) -> list[Any]:
    if isinstance(module_or_params, nn.Module):
        params: list[Any] = list(module_or_params.parameters())
    elif isinstance(module_or_params, Tensor):
        params = [module_or_params]
    elif isinstance(module_or_params, Iterable) and not isinstance(module_or_params, (str, bytes, dict)):
        params = list(dict.fromkeys(module_or_params))
    else:
        params = [None]
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise ValueError(
                "zp.gathered() takes a module, a parameter, or an iterable of parameters, not"
                f" {type(module_or_params if param is None else param).__name__}."
            )
    # A unit of FSDP2 may be unsharded on some ranks only.
    params = [param.as_listed() if hasattr(param, "as_listed") else param for param in params]
    world_size = dist.get_world_size() if agreement.is_distributed() else 1
    if writer is not None and (not isinstance(writer, int) or isinstance(writer, bool) or not 0 <= writer < world_size):
        raise ValueError(f"zp.gathered(writer={writer!r}): give a rank from 0 to {world_size - 1}, or None.")
    return params


class _ReplicatedWeights:
    """Weights that every rank has whole; nothing to do unless one rank writes."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    def show(self) -> None:
        """Do nothing: the weights are whole."""

    @torch.no_grad()
    def hide(self, writer: int | None) -> None:
        if writer is not None:
            for param in self.params:
                _broadcast(param, writer)

    def give_up(self) -> None:
        """Do nothing: what was written is in the weights."""


class _Stage3Weights:
    """Parameters that DeepSpeed partitions over the ranks."""

    def __init__(self, params: list[Any]) -> None:
        self.params = params

    def show(self) -> None:
        partition_alike(self.params)
        gather(self.params)
        for param in self.params:
            param._zeroplus_gathered = getattr(param, "_zeroplus_gathered", 0) + 1
            param.ds_active_sub_modules.add(_TOGETHER)  # so that the end of a forward within does not partition it
        _keep_for_backward(self.params)

    def hide(self, writer: int | None) -> None:
        error = self._check()
        sums = [] if writer is not None or error else agreement.checksum(param.data for param in self.params)
        try:
            errors = _shared(error)
            if errors:
                raise ValueError(errors[0])
            if writer is None and not agreement.all_equal(sums):
                raise RuntimeError(
                    "The ranks have written different values within zp.gathered(); keeping them would mix partitions of"
                    " different weights. Write the same on all ranks, or name the rank whose values count:"
                    " zp.gathered(..., writer=0)."
                )
            with torch.no_grad():
                for param in self.params:
                    if writer is not None:
                        _broadcast(param, writer)
                    _write_back(param)
        except BaseException:
            self._reload()
            raise
        finally:
            self._leave()

    def give_up(self) -> None:
        for param in self.params:
            if tuple(param.shape) == tuple(param.ds_shape):
                _write_back(param)
        self._leave()

    def _check(self) -> str | None:
        for param in self.params:
            if tuple(param.shape) != tuple(param.ds_shape):
                name = getattr(param, "_zeroplus_name", param.ds_id)
                return (
                    f"The parameter {name!r} was given the shape {tuple(param.shape)} within zp.gathered(). It must"
                    f" keep the shape {tuple(param.ds_shape)}."
                )
        return None

    def _reload(self) -> None:
        """Restore the values from before; a collective for weights that stay whole."""
        for param in self.params:
            note_kept(param)  # so that what was written is not kept
        staying = [param for param in self.params if not _becomes_partitioned(param, 1)]
        for param in staying:
            tokens = set(param.ds_active_sub_modules)
            param.ds_active_sub_modules.clear()
            param.partition(has_been_updated=False)
            param.ds_active_sub_modules.update(tokens)
        gather(staying)

    def _leave(self) -> None:
        for param in self.params:
            param._zeroplus_gathered -= 1
            if param._zeroplus_gathered == 0:
                param.ds_active_sub_modules.discard(_TOGETHER)
                if _becomes_partitioned(param, 0):
                    param.partition(has_been_updated=False)


def _becomes_partitioned(param: Any, depth: int) -> bool:
    in_use = param.ds_active_sub_modules - {_TOGETHER}
    return param._zeroplus_gathered == depth and not in_use and not param.ds_persist and not param.is_external_param


@torch.no_grad()
def _write_back(param: Any) -> None:
    if param.data.dtype != param.ds_tensor.dtype:
        param.data = param.data.to(param.ds_tensor.dtype)
    mine, values = own_slice(param, param.data)
    if not torch.equal(mine.to(values.device), values):
        write(param, param.data)


def _keep_for_backward(params: list[Any]) -> None:
    """Within a forward, let upstream gather the parameters for the backward of the running module.

    Upstream does that by itself if a module reads a parameter of another module.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    running = FWD_MODULE_STACK[-1] if FWD_MODULE_STACK else None
    if running is None or not torch.is_grad_enabled() or not getattr(running._parameters, "_in_forward", False):
        return
    for param in params:
        if param.requires_grad:
            register_external_parameter(running, param)
            param.ds_active_sub_modules.add(running.ds_id)


def _shared(error: str | None) -> list[str]:
    if not agreement.is_distributed():
        return [] if error is None else [error]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    return [each for each in found if each is not None]


def _broadcast(param: Any, writer: int) -> None:
    data = param.data.contiguous()
    flat = data.view(-1)
    dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, writer)
    if data.data_ptr() != param.data.data_ptr():
        param.data.copy_(data)


def is_any_gathered(params: Iterable[Any]) -> bool:
    """Whether one of ``params`` is whole because of :func:`gathered`."""
    return any(getattr(param, "_zeroplus_gathered", 0) for param in params)


def check_not_gathered(params: Iterable[Any]) -> None:
    """Refuse an optimizer step within :func:`gathered`, whose end would undo the step.

    Raises:
        RuntimeError: If one of ``params`` is whole because of :func:`gathered`; nothing was changed.
    """
    if is_any_gathered(params):
        raise RuntimeError(
            "optimizer.step() within zp.gathered(), whose end would write the old weights back. Leave zp.gathered()"
            " before the step."
        )
