"""``param.grad`` as DDP shows it, although the gradient is kept elsewhere.

From the last backward to the step, whoever reads ``param.grad`` gets the whole gradient, averaged over the ranks and
without a loss scale, and what is written there is what the step uses. Between the two the gradient lies in partitions
of the ranks. The first access gathers all gradients, once; the next backward, or the step, puts them back. A loop that
touches no ``param.grad`` does neither.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize

_grad: Any = torch.Tensor.grad
_read, _write = _grad.__get__, _grad.__set__
_NAME = "_shown_gradient"
_NOT_SHOWN = None, 0
# Their code handles gradients where they are kept; compilers of torch look at the tensor itself.
_INTERNAL = ("deepspeed.", "lightning_zeroplus.", "torch._")


class GradientKeeper(Protocol):
    """What keeps the gradients of an engine between two steps."""

    def is_busy(self) -> bool:
        """Whether a backward or a step runs, in which ``param.grad`` is what the engine has there."""

    def keeps_gradients(self) -> bool:
        """Whether ``param.grad``, between backwards and steps, is not what DDP would show: gradients are pending."""

    def whole_gradients(self) -> dict[int, Tensor]:
        """Gather every gradient. A collective: all ranks must call it.

        Returns:
            By index of the parameter the whole gradient, in the parameter's full shape, averaged and unscaled.
            Parameters without a gradient on any rank are left out.
        """

    def take_back(self, whole: dict[int, Tensor]) -> None:
        """Keep these gradients in the place of those that :meth:`whole_gradients` has given; no collective."""

    def window_gradient(self, index: int) -> Tensor | None:
        """What a parameter has accumulated in an open window: this rank's, not reduced yet.

        Raises:
            RuntimeError: If that is not all that DDP would show.
        """

    def is_holding(self) -> bool:
        """Whether a window, or ``no_sync()``, is open."""

    def is_used_up(self, index: int) -> bool:
        """Whether the step has used up the gradient, and nobody has called ``zero_grad()`` since."""

    def set_first(self) -> None:
        """A gradient is assigned by hand while none is pending."""

    def cleared(self, index: int) -> None:
        """The gradient that the last step used was set to None by hand."""

    def lost_hooks(self, index: int) -> None:
        """The tensor hooks of a parameter may not be called any more."""


class ShownGradients:
    """Whole gradients while somebody looks at them.

    Args:
        keeper: Where they are otherwise.
        params: The parameters; each is given a subclass of its class until :meth:`close`.

    Attributes:
        whole: By index of the parameter; None: nobody has looked since the last backward.
    """

    def __init__(self, keeper: GradientKeeper, params: Sequence[nn.Parameter]) -> None:
        self._keeper = keeper
        self._params = params
        self.whole: dict[int, Tensor] | None = None
        for index, param in enumerate(params):
            specialize(param, _ShowsGradient)
            setattr(param, _NAME, (self, index))

    def close(self) -> None:
        """Give the parameters their class back; their gradients are dropped."""
        self.whole = None
        for param in self._params:
            if vars(param).pop(_NAME, None) is not None:
                generalize(param, _ShowsGradient)

    def put_back(self) -> None:
        """Return the gradients, with whatever was written to them, to where they are kept."""
        if self.whole is not None:
            whole, self.whole = self.whole, None
            self._keeper.take_back(whole)

    def drop(self) -> None:
        """Forget the whole gradients: they are zeroed, or the step has used them."""
        self.whole = None

    def gather(self) -> dict[int, Tensor]:
        """The whole gradients, by index of the parameter."""
        if self.whole is None:
            self.whole = self._keeper.whole_gradients()
        return self.whole

    def read(self, index: int) -> Tensor | None:
        """``param.grad``."""
        if self._keeper.is_holding():
            return self._keeper.window_gradient(index)
        return self.gather().get(index)

    def write(self, index: int, value: Tensor | None) -> None:
        """``param.grad = value``.

        Raises:
            RuntimeError: Within a window.
        """
        if self._keeper.is_holding():
            raise RuntimeError(
                "`param.grad` was assigned inside a coalesce() window or no_sync(), where it is not reduced yet. Assign"
                " it after the window."
            )
        whole = self.gather()
        if value is None:
            whole.pop(index, None)
            return
        shape = getattr(self._params[index], "ds_shape", self._params[index].shape)
        if tuple(value.shape) != tuple(shape):
            raise RuntimeError(
                f"`param.grad` was assigned a tensor of shape {tuple(value.shape)}; the parameter has {tuple(shape)}."
            )
        whole[index] = value


class _ShowsGradient:
    """Mixin for a parameter."""

    @property
    def grad(self: Any) -> Tensor | None:
        """The gradient that the next step uses; see the module."""
        shown, index = self.__dict__.get(_NAME, _NOT_SHOWN)
        raw: Tensor | None = _read(self)
        if shown is None or shown._keeper.is_busy() or _is_internal():
            return raw
        if raw is None and shown._keeper.is_used_up(index):
            # A module zeroes what is not None.
            return torch.empty(0) if sys._getframe(1).f_code.co_name == "zero_grad" else _refuse_late_read()
        return shown.read(index) if shown._keeper.keeps_gradients() else raw

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        shown, index = self.__dict__.get(_NAME, _NOT_SHOWN)
        if shown is None or shown._keeper.is_busy() or _is_internal():
            _write(self, value)
        else:
            _assign(self, shown, index, value)

    @grad.deleter
    def grad(self: Any) -> None:
        shown, index = self.__dict__.get(_NAME, _NOT_SHOWN)
        if shown is None or shown._keeper.is_busy() or _is_internal():
            _write(self, None)
        else:
            _assign(self, shown, index, None)

    def note_write(self: Any) -> None:
        """A collective gets the parameter. With gradients enabled torch puts a hook of its own over all others."""
        shown, index = self.__dict__.get(_NAME, _NOT_SHOWN)
        if shown is not None:
            shown._keeper.lost_hooks(index)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        if isinstance(copied, _ShowsGradient):
            generalize(copied, _ShowsGradient)
        return copied


def _assign(param: Any, shown: ShownGradients, index: int, value: Tensor | None) -> None:
    if value is None and shown._keeper.is_used_up(index):
        _write(param, None)
        shown._keeper.cleared(index)
    elif shown._keeper.keeps_gradients():
        shown.write(index, value)
    elif value is None:
        _write(param, None)
    else:
        shown._keeper.set_first()
        shown.write(index, value)


def _refuse_late_read() -> NoReturn:
    raise RuntimeError(
        "`param.grad` was read after optimizer.step(), which has used up the gradient: ZeRO keeps no copy. Read it"
        " before the step, in `on_before_optimizer_step` for example. To drop gradients, call zero_grad()."
    )


def _is_internal() -> bool:
    frame = sys._getframe(2)  # this one, the property, and who reads or writes it
    # A module that is moved to another device moves what is in `param.grad`.
    return str(frame.f_globals.get("__name__", "")).startswith(_INTERNAL) or frame.f_code.co_name == "_apply"
