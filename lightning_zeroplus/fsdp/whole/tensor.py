"""WholeDTensor: a DTensor that behaves like the whole tensor of which it holds this rank's part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zeroplus.fsdp.whole import layout, rules
from lightning_zeroplus.fsdp.whole.aliases import outside
from lightning_zeroplus.fsdp.whole.collectives import communicate
from lightning_zeroplus.fsdp.whole.layout import Source, as_stored, at_address, fitting, gather, same_memory, store
from lightning_zeroplus.fsdp.whole.sides import ParameterSide, SameParameter, UnitSide, check_data
from lightning_zeroplus.gradients.patches.transforms import is_wrapped


class WholeDTensor(SameParameter, DTensor):
    """A sharded weight, its gradient, or a tensor that was computed from them.

    A program can use it like a weight of an ordinary module, with the same results, if all ranks do the same.
    Elementwise operations and norms run on the shards. Everything else runs on the whole tensor: it is gathered, and
    what is written to it is written to the shards. For a differentiable operation the unit of the weight is gathered,
    as for the unit's own forward.

    An existing DTensor becomes one by assignment to ``__class__``, and stays the same object for the optimizer and for
    FSDP2. Operations of torch itself, such as an optimizer's or a checkpoint's, run within :data:`as_stored`.

    Attributes:
        link: The parameter that the tensor is, or shares memory with; None otherwise.
        shared: Whether all ranks write the same to it: it is a weight or an averaged gradient.
        is_read: Whether this rank alone may have the whole tensor, see :func:`.at_address`.
    """

    link: ParameterSide | None = None
    shared = is_read = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept every operation with a ``WholeDTensor`` among its arguments."""
        with as_stored():
            descriptor: Any = getattr(func, "__self__", None)
            attribute = getattr(descriptor, "__name__", None)
            if func.__name__ == "__get__":
                return _get(attribute, func, args)
            if func.__name__ == "__delete__":  # `del param.grad`
                return _set(attribute, descriptor.__set__, (*args, None))
            if func.__name__ == "__set__":
                return _set(attribute, func, args)
            return _call(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the whole tensor, as under DDP; within :data:`as_stored`, for our checkpoints, to a DTensor."""
        if torch._C._is_torch_function_enabled():
            full = gather(self)
            whole = nn.Parameter(full, self.requires_grad) if isinstance(self, nn.Parameter) else full
            return whole.__reduce_ex__(protocol)
        with as_stored():
            plain = self.detach()
            if isinstance(self, nn.Parameter):
                plain = nn.Parameter(plain, self.requires_grad)
            return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy to an ordinary, whole tensor."""
        full = gather(self)
        copy = nn.Parameter(full, self.requires_grad) if isinstance(self, nn.Parameter) else full
        memo[id(self)] = copy
        return copy


class _Stepping:
    """Whether an optimizer runs: tensors that it makes for its states stay sharded."""

    active = False


@contextmanager
def stepping() -> Iterator[None]:
    """Wrap the step of an optimizer that does not run within :data:`as_stored`."""
    before, _Stepping.active = _Stepping.active, True
    try:
        yield
    finally:
        _Stepping.active = before


def view_as_whole(tensor: Any, link: ParameterSide | None = None, shared: bool = False) -> Any:
    """Make a DTensor from FSDP2, or from an operation on DTensors, behave like a whole tensor, in place."""
    if isinstance(tensor, DTensor) and not isinstance(tensor, WholeDTensor):
        tensor.__class__ = WholeDTensor
    if isinstance(tensor, WholeDTensor) and (link is not None or shared):
        tensor.link, tensor.shared = link, shared
    return tensor


# -- attributes ------------------------------------------------------------------------------------------------------


def _get(attribute: str | None, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    tensor, link = args[0], args[0].link
    if attribute == "grad":
        if link is not None and isinstance(tensor, nn.Parameter) and link.in_backward is not None:
            return link.accumulated(func(link.in_backward))
        if link is not None:
            link.before_grad(reader=sys._getframe(2))
        return view_as_whole(func(*args), shared=True)
    if attribute == "data":
        return _given(tensor, func, args)
    if attribute in ("T", "mT", "H", "mH", "real", "imag"):
        return on_whole(func, args, {}, differentiable([tensor]))
    return func(*args)


def _set(attribute: str | None, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    tensor, value = args[0], args[1]
    link = tensor.link
    if attribute == "data":
        check_data(tensor, value)
        alias = view_as_whole(tensor.detach(), link, tensor.shared)
        with torch.no_grad(), nullcontext(value) if link is None else link.assigning(value) as values:
            _call(Tensor.copy_, (alias, values), {})
        return
    if attribute == "grad":
        if link is not None and isinstance(tensor, nn.Parameter) and torch._C._current_graph_task_id() != -1:
            return link.group.assign(link, value)
        if link is not None:
            link.before_grad(drops=value is None)
        if isinstance(value, Tensor):
            value = fitting(value, tensor)
    func(tensor, value)
    if link is not None:
        link.was_set(attribute, args[1])


def _given(tensor: WholeDTensor, func: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    """Give the user a view of the same memory, and note it."""
    with torch.inference_mode(False):  # in which torch refuses any view of a DTensor
        alias = func(*args, **(kwargs or {}))
    view_as_whole(alias, tensor.link, tensor.shared)
    if tensor.link is not None:
        tensor.link.aliases.add(alias)
    return alias


# -- operations ------------------------------------------------------------------------------------------------------


@torch.compiler.disable
def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = rules.name_of(func)
    ours = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WholeDTensor)]
    outside.settle(ours)
    if name in ("register_hook", "register_post_accumulate_grad_hook") and ours[0].link is not None:
        return ours[0].link.register(name, *args[1:], **kwargs)
    if func is torch.autograd.grad or rules.finds_node(name):
        args, kwargs = tree_map_only(WholeDTensor, _leaf, (args, kwargs))
        return func(*args, **kwargs)
    if getattr(func, "__module__", None) == dist.distributed_c10d.__name__:
        return communicate(func, args, kwargs)
    if name in rules.ADDRESSES and (_Stepping.active or ours[0].link is None or isinstance(ours[0], nn.Parameter)):
        return func(outside.give(ours[0], address=True))
    if name in rules.ADDRESSES or name == "clone" and ours[0].is_read:
        return func(at_address(ours[0]), *args[1:], **kwargs)
    if name == "detach_" and not ours[0].requires_grad:
        return ours[0]  # a gradient: torch refuses it for the view that the shard is
    if name in rules.METADATA:
        result = func(*args, **kwargs)
        if name == "requires_grad_" and ours[0].link is not None:
            ours[0].link.follow_requires_grad()
        return result
    if targets := rules.written(func, args, kwargs):
        return _write(name, func, args, kwargs, targets)
    if name in rules.LEAVES_TORCH and (kwargs.get("force") or not differentiable(ours)):
        return func(outside.give(ours[0]), *args[1:], **kwargs)
    if name == "view_as_real" and _Stepping.active:
        return view_as_whole(layout.as_real(ours[0]), shared=True)
    if name == "detach":
        return _given(ours[0], func, args, kwargs)
    for tensor in ours:
        if tensor.link is not None:
            tensor.link.settle()
    in_graph = differentiable(ours)
    exact = all(tensor.dtype not in (torch.bfloat16, torch.float16) for tensor in ours)
    # One rank alone may read weights, or copy one, while the others only serve gathers: partial results would need a
    # collective, and the others would not have their parts of the copy.
    links = [] if _Stepping.active else [tensor.link for tensor in ours if tensor.link is not None]
    is_read = len(links) == len(ours) and (name not in rules.COPIES or not (in_graph or links[0].may_copy()))
    if in_graph or is_read or _others(args, kwargs) or not rules.runs_on_shards(name, _Stepping.active, exact):
        return on_whole(func, args, kwargs, in_graph)
    result = rules.on_shards(name, func, args, kwargs)
    if name in rules.COPIES and result.device != ours[0].device:
        return on_whole(func, args, kwargs, in_graph)  # shards on another device than their mesh could not be gathered
    return _result(result)


def _leaf(tensor: WholeDTensor) -> Tensor:
    """The tensor that a graph has instead of a weight."""
    return tensor if tensor.link is None else tensor.link.unsharded


def differentiable(tensors: list[WholeDTensor]) -> bool:
    """Whether the results of operations on these tensors will be part of a graph."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there are ordinary tensors among the arguments, with which the result belongs to this rank alone."""
    return any(isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))


def _result(result: Any) -> Any:
    """Keep sharded results sharded; make scalars, which users log, stack and compare, and all others whole."""

    def see(tensor: DTensor) -> Any:
        sharded = tensor.ndim > 0 and any(placement.is_shard() for placement in tensor.placements)
        return view_as_whole(tensor) if sharded else tensor.full_tensor()

    return tree_map_only(DTensor, see, result)


def on_whole(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_graph: bool,
    only: type[DTensor] = DTensor,
) -> Any:
    """Call ``func`` with whole tensors, on all ranks together.

    Args:
        func: Any function of tensors.
        args: The function's arguments.
        kwargs: The function's named arguments.
        in_graph: Whether the operation is differentiable: the units of weights are gathered then.
        only: The class of the DTensors that are made whole.

    Returns:
        The result of ``func``. Writes to tensors in it that share memory with a weight go to the weight.
    """
    wholes: list[tuple[WholeDTensor, Tensor]] = []
    seen: list[tuple[WholeDTensor, Tensor]] = []
    opened: list[UnitSide] = []

    def whole(tensor: DTensor) -> Tensor:
        with as_stored():
            if isinstance(tensor, WholeDTensor) and tensor.link is not None and in_graph:
                if not tensor.link.group.is_open:
                    opened.append(tensor.link.group)
                full = tensor.link.open(tensor)
                seen.append((tensor, full))
                return full
            if isinstance(tensor, WholeDTensor) and in_graph and tensor.requires_grad:
                # Backward averages over the ranks here, like every other gradient.
                average = [Partial("avg")] * tensor.device_mesh.ndim
                return tensor.full_tensor(grad_placements=average)
            full = gather(tensor)
            if isinstance(tensor, WholeDTensor):
                wholes.append((tensor, full))
            return full

    args, kwargs = tree_map_only(only, whole, (args, kwargs))
    result = func(*args, **kwargs)
    if opened and not any(leaf.requires_grad for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
        for group in opened:
            group.close()  # the result is in no graph, for example of a comparison
    # Views that are in a graph: FSDP2 frees the memory with the unit.
    wholes += [
        each for each in seen if any(same_memory(leaf, each[1]) for leaf in tree_leaves(result) if type(leaf) is Tensor)
    ]
    for tensor, full in wholes:
        source = Source(tensor, full)
        if tensor.link is not None:
            tensor.link.aliases.note(source)
        result = tree_map_only(Tensor, partial(WholeView.of, source=source), result)
    return result


# -- writes ----------------------------------------------------------------------------------------------------------


def _write(name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], targets: list[Any]) -> Any:
    recorded = torch.is_grad_enabled() and getattr(func, "__module__", None) != nn.init.__name__  # without autograd
    if recorded and any(target.requires_grad and target.is_leaf for target in targets):
        return func(*args, **kwargs)  # autograd's own refusal
    in_whole = False  # a whole copy is in use: within `zp.gathered()`, where one rank may write alone, and a forward
    for target in targets:
        if isinstance(target, WholeDTensor):
            _check_shared(name, target, args, kwargs)
            if target.link is not None:
                target.link.before_write(is_counted=isinstance(target, nn.Parameter))
                in_whole = in_whole or target.link.shown is not None or target.link.is_computing
    ours = not in_whole and all(isinstance(target, DTensor) for target in targets) and kwargs.get("out") is None
    if ours and rules.runs_on_shards(name, _Stepping.active) and rules.fit(name, args, kwargs):
        with rules.replicating(targets[0]):
            rules.on_shards(name, func, args, kwargs)
        result = args[0] if args else kwargs["tensor"]  # of `torch.nn.init`
    else:
        result = _write_whole(func, args, kwargs, targets)
    if not _Stepping.active:
        outside.follow()
    return result


def _check_shared(name: str, target: WholeDTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if target.shared or _Stepping.active or not _others(args, kwargs):
        return
    if all(
        leaf.ndim == 0 or isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
    ):
        return
    raise ValueError(
        f"`{name}` would write a tensor of this rank alone into a tensor that was computed from sharded weights and is"
        " sharded itself: each rank would keep its part of another tensor. Make it whole first, with `.full_tensor()`."
    )


def _write_whole(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], targets: list[Any]) -> Any:
    fulls: dict[int, Tensor] = {}

    def whole(tensor: DTensor) -> Tensor:
        if id(tensor) not in fulls:
            fulls[id(tensor)] = gather(tensor)
        return fulls[id(tensor)]

    args, kwargs = tree_map_only(DTensor, whole, (args, kwargs))
    result = func(*args, **kwargs)
    stored = {id(fulls[id(target)]): target for target in targets if isinstance(target, DTensor)}
    for target in stored.values():
        store(fulls[id(target)], target)
    return tree_map_only(Tensor, lambda tensor: stored.get(id(tensor), tensor), result)


class WholeView(Tensor):
    """A view of a gathered weight: it follows the weight, and writes to it go to the weight."""

    _source: Source

    @staticmethod
    def of(part: Any, source: Source) -> Any:
        """``part`` as a view of the weight, if it shares the memory of what was gathered."""
        if type(part) is not Tensor or is_wrapped(part) or not same_memory(part, source.full):
            return part
        view = part.as_subclass(WholeView)
        view._source = source
        return view

    @staticmethod
    def become(tensor: Any, source: Source) -> Any:
        """Make a tensor with some of the memory of what was gathered a view of the weight, in place."""
        tensor.__class__, tensor._source = WholeView, source
        return tensor

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with as_stored():
            if func.__name__ == "__set__":
                return func(*args, **kwargs)
            plain = tree_map_only(WholeView, lambda view: view.as_subclass(Tensor), (args, kwargs))
            views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WholeView)]
            outside.settle(view._source.tensor for view in views)
            if func.__name__ in rules.LEAVES_TORCH:
                (part, *rest), named = plain
                return func(outside.give_part(views[0]._source, part), *rest, **named)
            written = [each for each in rules.written(func, args, kwargs) if isinstance(each, WholeView)]
            for view in written:
                if view._source.link is not None:
                    view._source.link.before_write()
            if written or (func.__name__ != "__get__" and rules.name_of(func) not in rules.METADATA):
                for view in views:
                    view._source.refresh()
            if written:
                result = _call_plain(func, *plain)
                for view in written:
                    view._source.store()
                outside.follow()
                return next((view for view in written if view._source.has(result)), result)
            return tree_map_only(Tensor, partial(cls.of, source=views[0]._source), _call_plain(func, *plain))


def _call_plain(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if any(isinstance(leaf, WholeDTensor) for leaf in tree_leaves((args, kwargs))):
        return _call(func, args, kwargs)
    return func(*args, **kwargs)
