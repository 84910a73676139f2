"""``param.grad`` as DDP shows it, although the gradient is kept elsewhere.

Between the last backward and the step, the gradient lies in partitions of the ranks. Reading ``param.grad`` there gives
the whole gradient, averaged over the ranks and without a loss scale; the step uses what is written to it. The first
access gathers all gradients, once. The next backward, or the step, puts them back. A loop that never touches
``param.grad`` does neither.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_zeroplus.gradients.dtype import check_assigned
from lightning_zeroplus.gradients.followed import KeptGradients, LeftBehind, Unscaled
from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.gradients.tasks import refuse_both, refuse_late_read

_grad: Any = torch.Tensor.grad
#: The plain ``param.grad``, which is what code of this package gets from ``param.grad`` too, in more time.
read_plain, write_plain = _grad.__get__, _grad.__set__
_NAME = "_shown_gradient"
_NOT_SHOWN = type(None), 0
# Code of these packages works on the gradients where they are kept; torch's compilers look at the tensor itself.
_INTERNAL = ("deepspeed.", "lightning_zeroplus.", "torch._")


class GradientKeeper(Protocol):
    """Keeps the gradients of an engine between two steps.

    Attributes:
        keeps_parts: Whether a rank keeps a part of each averaged gradient; False: all ranks keep all.
    """

    keeps_parts: bool

    def is_stepping(self) -> bool:
        """Whether a step runs."""

    def is_busy(self) -> bool:
        """Whether a backward or a step runs, during which ``param.grad`` is the plain attribute."""

    def gradient_in_backward(self, index: int, plain: Tensor | None) -> Tensor | None:
        """What a parameter has accumulated on this rank: ``plain``, or what is kept elsewhere; may refuse that."""

    def write_in_backward(self, index: int, value: Tensor | None) -> None:
        """Assign a gradient within a backward, or a step; may refuse that."""

    def keeps_gradients(self) -> bool:
        """Whether gradients are pending that the plain ``param.grad`` does not have."""

    def whole_gradients(self) -> dict[int, Tensor]:
        """Gather every gradient. A collective: all ranks must call it.

        Returns:
            The whole gradients by index of the parameter: in the parameter's full shape, averaged and unscaled.
            Parameters without a gradient on any rank are left out.
        """

    def whole_gradients_together(self) -> dict[int, Tensor]:
        """The same where all ranks are known to come."""

    def take_back(self, whole: dict[int, Tensor]) -> None:
        """Keep these gradients instead of the ones that :meth:`whole_gradients` returned; no collective."""

    def take_some_back(self, whole: dict[int, Tensor]) -> None:
        """The same for some of those that are pending."""

    def does_any_rank(self, here: bool) -> bool:
        """Whether it is true on some rank. A collective."""

    def loss_scale(self) -> float:
        """With which what :meth:`window_gradient` returns is multiplied; 1 without fp16."""

    def window_gradient(self, index: int) -> Tensor | None:
        """The gradient that a parameter has accumulated on this rank in an open window, not reduced yet.

        Raises:
            RuntimeError: If DDP would show more than that.
        """

    def is_holding(self) -> bool:
        """Whether a window, or ``no_sync()``, is open."""

    def is_outside(self, index: int) -> bool:
        """Whether no optimizer has this parameter: its gradient is in the plain ``param.grad``."""

    def average_outside(self) -> None:
        """Average the gradients of such parameters, if a backward has come since; a collective then."""

    def write_outside(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Assign the gradient of such a parameter."""

    def is_unsynced(self, index: int) -> bool:
        """Whether a gradient is this rank's own: the last backward was within ``no_sync()``."""

    def has_both(self, index: int) -> bool:
        """Whether it is the sum of an average and of this rank's own gradient under DDP, which is not kept here."""

    def set_local(self, index: int, value: Tensor | None) -> None:
        """Let ``value``, unscaled, be the gradient of a parameter on this rank, which is not reduced yet."""

    def is_used_up(self, index: int) -> bool:
        """Whether a step has used up the gradient, and ``zero_grad()`` was not called since."""

    def reread(self, index: int) -> bool:
        """Keep the gradient that the last step used for the next one, which is accessed; False: it was released."""

    def set_first(self) -> None:
        """Note that a gradient is assigned by hand while none is pending."""

    def cleared(self, index: int) -> None:
        """Note that the gradient that the last step used was set to None by hand."""

    def lost_hooks(self, index: int) -> None:
        """Note that torch may no longer call the tensor hooks of a parameter."""

    def users_hook(self, index: int) -> None:
        """Note that a user has set a hook that runs after a gradient was accumulated."""


class ShownGradients:
    """The whole gradients while the user looks at them.

    Args:
        keeper: Keeps the gradients at all other times.
        params: The parameters; each is given a subclass of its class until :meth:`close`.

    Attributes:
        whole: The whole gradients by index of the parameter; None: not accessed since the last backward.
        kept: Those that were put back, which the user may have kept; None on all ranks if there are none. As long as
            some rank has one, every backward ends with showing the gradients again, in the kept tensors.
    """

    def __init__(self, keeper: GradientKeeper, params: Sequence[nn.Parameter]) -> None:
        self._keeper = keeper
        self._params = params
        self.whole: dict[int, Tensor] | None = None
        self.kept: KeptGradients | None = None
        self._local: dict[int, Unscaled] = {}
        self.left_behind = LeftBehind()
        for index, param in enumerate(params):
            specialize(param, _ShowsGradient)
            setattr(param, _NAME, (ref(self), index))  # torch may keep a parameter longer than its engine is used

    def close(self) -> None:
        """Give the parameters their class back and drop their gradients."""
        self.whole = None
        for param in self._params:
            if vars(param).pop(_NAME, None) is not None:
                generalize(param, _ShowsGradient)

    def put_back(self) -> None:
        """Give the gradients, with whatever was written to them, back to the keeper."""
        self.put_back_local()
        if self.whole is not None:
            whole, self.whole = self.whole, None
            self._keeper.take_back(whole)
            self.kept = KeptGradients(whole)

    def take_kept(self) -> None:
        """Give the keeper what was written to kept gradients since they were put back."""
        if self.kept is not None and self.kept.are_current:
            tensors = self.kept.tensors()
            if tensors:
                self._keeper.take_some_back(tensors)

    def before_backward(self) -> None:
        """A backward is about to add to the gradients, which are put back."""
        self.left_behind.check()
        if self.kept is not None:
            self.take_kept()
            self.kept.are_current = False

    def follow(self) -> None:
        """Gradients were reduced, on all ranks: show them in what the user has kept. A collective if he may have."""
        self.left_behind.reduced()
        if self.kept is None:
            return
        if self._keeper.does_any_rank(bool(self.kept.tensors())):
            self._show(self._keeper.whole_gradients_together())
        else:
            self.kept = None

    def _show(self, whole: dict[int, Tensor]) -> None:
        with torch.no_grad():
            self.whole = whole if self.kept is None else self.kept.updated(whole)
        self.kept = None

    def zero(self, set_to_none: bool, indices: frozenset[int] | None = None) -> None:
        """The gradients are zeroed: all, or those of these parameters, after :meth:`put_back`."""
        if indices is None and self.whole is not None:
            whole, self.whole = self.whole, None
            self.kept = None if set_to_none else KeptGradients(whole)
            del whole
        if set_to_none:
            self.left_behind.forget(indices)
        if self.kept is None:
            return
        if set_to_none:
            self.forget(indices)
        else:
            with torch.no_grad():
                self.kept.zero(indices)
            self.kept.are_current |= indices is None

    def forget(self, indices: Iterable[int] | None) -> None:
        """The gradients of these parameters, or all, are None: what is kept of them stays as it is."""
        if self.kept is not None and (indices is None or self.kept.forget(indices)):
            self.kept = None

    def before_clip(self) -> None:
        """All ranks clip: in gradients that are kept, too, and not only in the step."""
        if self.kept is not None:
            self.take_kept()
            self.follow()

    def before_step(self) -> None:
        """All ranks step."""
        self.left_behind.check()
        if self.kept is not None and not self.kept.are_current:
            self.follow()  # after a window
        self.take_kept()

    def after_step(self) -> None:
        """A step has used the gradients. Under DDP they are there still, and what is written to them counts."""
        if self.kept is not None:
            self.kept.are_current = True

    def put_back_local(self) -> None:
        """Give what was written to gradients in a window back, with their loss scale."""
        while self._local:
            self._local.popitem()[1].put_back()

    def drop(self) -> None:
        """Drop the gradients: they were zeroed, or the step has used them."""
        self.whole = None
        self._local.clear()

    def gather(self) -> dict[int, Tensor]:
        """The whole gradients, by index of the parameter; a collective on the first access."""
        if self.whole is None:
            self.take_kept()
            self._show(self._keeper.whole_gradients())
        assert self.whole is not None
        return self.whole

    def read(self, index: int) -> Tensor | None:
        """``param.grad``."""
        if self._keeper.is_holding() or self._keeper.is_unsynced(index):
            return self._read_local(index)
        return self.gather().get(index)

    def take_over(self, previous: ShownGradients) -> None:
        """Follow what was kept of the gradients of an earlier accumulation of the same module."""
        if previous.kept is not None:
            now = {id(param): index for index, param in enumerate(self._params)}
            before = ((index, id(param)) for index, param in enumerate(previous._params))
            self.kept = previous.kept.renumbered({index: now[key] for index, key in before if key in now})

    def read_outside(self, param: nn.Parameter) -> Tensor | None:
        """``param.grad`` of a parameter that no optimizer has."""
        if param.requires_grad:
            self._keeper.average_outside()
        return read_plain(param)

    def _read_local(self, index: int) -> Tensor | None:
        grad, scale = self._keeper.window_gradient(index), self._keeper.loss_scale()
        if grad is not None and scale != 1.0:
            grad = self._local.setdefault(index, Unscaled(grad, scale)).shown
        if grad is not None and self._keeper.keeps_parts:
            self.left_behind.note(index, grad)
        return grad

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
        if value is not None:
            check_assigned(value, self._params[index])
        if self._keeper.is_unsynced(index):
            self.put_back_local()
            self._keeper.set_local(index, value)
            return
        if value is not None and self._keeper.has_both(index):
            refuse_both("assigned")
        whole = self.gather()
        if value is None:
            whole.pop(index, None)
            return
        whole[index] = value


class _ShowsGradient:
    """Mixin for a parameter."""

    @property
    def grad(self: Any) -> Tensor | None:
        """The gradient that the next step uses; see the docstring of this module."""
        shown, index = _shown(self)
        raw: Tensor | None = read_plain(self)
        if shown is None or raw is not None and shown._keeper.is_stepping() or _is_internal():
            return raw
        if shown._keeper.is_busy():
            return shown._keeper.gradient_in_backward(index, raw)
        if raw is None and shown._keeper.is_used_up(index):
            if sys._getframe(1).f_code.co_name == "zero_grad":
                return torch.empty(0)  # module.zero_grad() assigns None only where the gradient is not None yet
            if not shown._keeper.reread(index):
                refuse_late_read()
        if shown._keeper.is_outside(index):
            # module.zero_grad() only asks whether there is one.
            return raw if sys._getframe(1).f_code.co_name == "zero_grad" else shown.read_outside(self)
        if not shown._keeper.keeps_gradients():
            return raw
        if shown._keeper.has_both(index) and sys._getframe(1).f_code.co_name != "zero_grad":
            refuse_both("read")
        return shown.read(index)

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        _assign(self, value)

    @grad.deleter
    def grad(self: Any) -> None:
        _assign(self, None)

    def register_post_accumulate_grad_hook(self: Any, hook: Any) -> Any:
        """Set a hook that sees, and may change, what the parameter has accumulated on this rank."""
        handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[misc]
        shown, index = _shown(self)
        if shown is not None:
            shown._keeper.users_hook(index)
        return handle

    def note_write(self: Any) -> None:
        """Note that a collective gets the parameter: with grad enabled, torch's own hook then replaces all others."""
        shown, index = _shown(self)
        if shown is not None:
            shown._keeper.lost_hooks(index)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        if isinstance(copied, _ShowsGradient):
            generalize(copied, _ShowsGradient)
        return copied


def _shown(param: Any) -> tuple[Any, int]:
    shown, index = param.__dict__.get(_NAME, _NOT_SHOWN)
    return shown(), index


def _assign(param: Any, value: Tensor | None) -> None:
    shown, index = _shown(param)
    if shown is None or _is_internal(above=1):
        write_plain(param, value)
    elif shown._keeper.is_busy():
        shown._keeper.write_in_backward(index, value)
    elif shown._keeper.is_outside(index):
        shown._keeper.write_outside(param, value)
    elif value is None and shown._keeper.is_used_up(index):
        write_plain(param, None)
        shown._keeper.cleared(index)
        shown.forget((index,))
    elif shown._keeper.keeps_gradients() or shown._keeper.reread(index):
        shown.write(index, value)
    elif value is None:
        write_plain(param, None)
    else:
        shown._keeper.set_first()
        shown.write(index, value)


def _is_internal(above: int = 0) -> bool:
    frame = sys._getframe(2 + above)  # frames: this one, the property, and the code that reads or writes it
    # module.to(), which runs `_apply`, moves the plain `param.grad`.
    return str(frame.f_globals.get("__name__", "")).startswith(_INTERNAL) or frame.f_code.co_name == "_apply"
