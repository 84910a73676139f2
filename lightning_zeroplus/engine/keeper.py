"""An accumulation's gradients as DDP shows them: gathered, unscaled and clipped, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from lightning_zeroplus.engine.clipping import ClipsKept
from lightning_zeroplus.engine.optimizer.anew.marks import end_marks
from lightning_zeroplus.engine.optimizer.chain import give_back
from lightning_zeroplus.engine.optimizer.split_steps import Stretch
from lightning_zeroplus.engine.reduction.exchange import Piece
from lightning_zeroplus.engine.reduction.life import Event, Life, Place
from lightning_zeroplus.engine.reduction.wire_dtypes import sum_dtype_of
from lightning_zeroplus.gradients.again import EvaluatesAgain
from lightning_zeroplus.gradients.clip import Clip
from lightning_zeroplus.gradients.ranks.agreement import Presence
from lightning_zeroplus.gradients.shown import write_plain
from lightning_zeroplus.gradients.tasks import refuse_earlier_average
from lightning_zeroplus.weights.agreement import meet

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.local_sums import LocalSums


class OwnGradients(NamedTuple):
    """A rank's part of the averaged gradients.

    Attributes:
        parts: The elements of a parameter that this rank keeps, by the parameter's index.
        are_whole: Whether every rank has all elements.
        scale: What they are multiplied with.
        clips: What clips them later: all of them, or those of one of several optimizers, by its number.
    """

    parts: list[tuple[int, Tensor]]
    are_whole: bool
    scale: float
    clips: dict[int | None, Clip]


class Keeper(ClipsKept):
    """The side of a gradient accumulation that :class:`~lightning_zeroplus.gradients.shown.ShownGradients` asks.

    Attributes:
        keeps_parts: Whether a rank keeps a part of each averaged gradient; False: all ranks keep all.
    """

    keeps_parts: bool = True
    engine: EngineHost
    optimizer: Any
    params: list[nn.Parameter]
    index: dict[int, int]
    optimized: frozenset[int]
    local_sums: LocalSums
    serve_others: Callable[[], None]
    restore_used: Callable[[], None]
    clip_for_all: Callable[[int | None], None]
    _own: Callable[[Iterable[int]], list[Piece]]
    averaged: set[int]
    synced: frozenset[int]
    was_synced: Callable[[int], bool]
    is_outside: Callable[[int], bool]
    follows_outside: bool
    life: Life
    used: set[int]
    ends_direct_backward: bool

    def is_stepping(self) -> bool:
        return self.engine.stepping

    def is_busy(self) -> bool:
        engine = self.engine
        return engine.stepping or engine._running_engine_backward or self.ends_direct_backward

    def gradient_in_backward(self, index: int, plain: Tensor | None) -> Tensor | None:
        if self.engine.stepping:
            return plain
        grad = self.local_sums.waiting(index) if plain is None else plain
        if self._is_partial(index, grad):
            refuse_earlier_average("read")
        return grad

    def write_in_backward(self, index: int, value: Tensor | None) -> None:
        param = self.params[index]
        if not self.engine.stepping:
            if self.keeps_parts and index in self.averaged and self.life.place(index) is not Place.IN_FLIGHT:
                refuse_earlier_average("assigned")
            if value is not None and value.shape != param.shape and value.shape == getattr(param, "ds_shape", None):
                self.local_sums.replace(index, value.detach().to(sum_dtype_of(param)))  # it is partitioned
                return
            self.local_sums.replace(index, None)
        write_plain(param, value)

    def _is_partial(self, index: int, grad: Tensor | None) -> bool:
        """In a backward, whether this is not what DDP has accumulated."""
        if self.life.place(index) is Place.IN_FLIGHT:
            return grad is None or self.is_overwritten(index)
        was_synced = self.follows_outside if self.is_outside(index) else self.was_synced(index)
        return self.keeps_parts and index in self.averaged or grad is not None and was_synced

    def keeps_gradients(self) -> bool:
        return not self.life.is_empty

    def is_holding(self) -> bool:
        return self.local_sums.holding

    def is_unsynced(self, index: int) -> bool:
        return self.unsynced and not (self.keeps_parts and index in self.averaged)

    def has_both(self, index: int) -> bool:
        if self.unsynced:
            return index in self.synced
        waits = self.local_sums.holding and self.life.is_waiting
        return waits and self.window_sum(index) is not None

    def forget_synced(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters are dropped, or assigned by hand."""
        self.synced = self.synced.difference(indices)

    def set_local(self, index: int, value: Tensor | None) -> None:
        """Let ``value`` be the gradient of a parameter on this rank, which waits for a reduction."""
        self.forget_synced((index,))
        if value is None:
            self.local_sums.sums.pop(index, None)
        else:
            scaled = value.detach() * self.engine.loss_scale_factor()
            self.local_sums.sums[index] = scaled.to(sum_dtype_of(self.params[index])).contiguous()

    def loss_scale(self) -> float:
        return self.engine.loss_scale_factor()

    def window_gradient(self, index: int) -> Tensor | None:
        if index in self.averaged or (self.local_sums.only is not None and index not in self.local_sums.only):
            raise RuntimeError(
                "`param.grad` was read inside a coalesce() window or no_sync(), where some gradients are reduced"
                " already and others are not. Read it after the window."
            )
        return self.window_sum(index)

    def window_sum(self, index: int) -> Tensor | None:
        """What a parameter has accumulated on this rank, not reduced yet."""
        return self.local_sums.sums.get(index)

    def is_used_up(self, index: int) -> bool:
        return index in self.used

    def set_first(self) -> None:
        self.life.goes_on(Event.SET)

    def whole_gradients(self) -> dict[int, Tensor]:
        self.serve_others()
        meet("Access to `param.grad`, which gathers the gradients of all ranks", details="")
        return self.whole_gradients_together()

    def whole_gradients_together(self) -> dict[int, Tensor]:
        with torch.no_grad():
            self._make_averaged()
            whole = self._to_show()
            scale = self.engine.loss_scale_factor()
            if scale != 1.0:
                # In fp16 what is left without the scale may be too small.
                whole = {index: grad.float().div_(scale) for index, grad in whole.items()}
            if self.clip is not None:
                self._clip_shown(self.clip, whole, None)
                self.clip = None
            for part, clip in self.clips.items():
                self._clip_shown(clip, self._of_part(whole, part), part)
            self.clips.clear()
        return whole

    def own_gradients(self, part: int | None = None) -> OwnGradients:
        """This rank's part of the averaged gradients, before they are clipped; a collective if they wait.

        Args:
            part: The number of one of several optimizers, which steps next.
        """
        self.serve_others()
        self.restore_used()
        self.clip_for_all(part)
        shown = getattr(self, "shown", None)
        if shown is not None and shown.whole is not None:
            return OwnGradients(list(shown.whole.items()), True, 1.0, {})
        with torch.no_grad():
            self._make_averaged()
            clips: dict[int | None, Clip] = dict(self.clips.items())
            if self.clip is not None:
                clips[None] = self.clip
            if not self.keeps_parts:
                return OwnGradients(list(self._whole().items()), True, self.engine.loss_scale_factor(), clips)
            mine = self._owned_pieces()[dist.get_rank(group=self._process_group())]
            pieces = [piece for piece in mine if piece.param in self.averaged and piece.numel]
            own = [(piece.param, self._slot(piece)) for piece in pieces]
        return OwnGradients(own, False, self.engine.loss_scale_factor(), clips)

    def take_back(self, whole: dict[int, Tensor]) -> None:
        self.averaged = whole.keys() & self.optimized
        scale = self.engine.loss_scale_factor()
        with torch.no_grad():
            self._keep(whole if scale == 1.0 else {index: grad * scale for index, grad in whole.items()})

    def take_some_back(self, whole: dict[int, Tensor]) -> None:
        scale = self.engine.loss_scale_factor()
        pending = {index: grad for index, grad in whole.items() if index in self.averaged and index in self.optimized}
        with torch.no_grad():
            self._keep_some(pending if scale == 1.0 else {index: grad * scale for index, grad in pending.items()})

    def does_any_rank(self, here: bool) -> bool:
        if self.life.is_waiting:
            self.sync()  # type: ignore[attr-defined]
        question = Presence([0], {0} if here else (), torch.device("cpu"), self.engine.hosts)
        return bool(question.result())

    # -- what families may do differently -----------------------------------------------------------------------------

    def is_overwritten(self, index: int) -> bool:
        """Within a backward: whether ``param.grad`` may be anything, because its bucket is reduced."""
        return False

    def _make_averaged(self) -> None:
        """Reduce what waits."""
        self.local_sums.settle()
        self.reduce_if_needed()  # type: ignore[attr-defined]

    def _owned_pieces(self) -> Sequence[Sequence[Piece]]:
        """What each rank has of the optimized parameters' gradients."""
        raise NotImplementedError

    def _slot(self, piece: Piece) -> Tensor:
        """Where this rank keeps a piece of an averaged gradient; flat."""
        raise NotImplementedError

    def _process_group(self) -> Any:
        return self.optimizer.dp_process_group

    def _whole(self) -> dict[int, Tensor]:
        """Gather the averaged gradients from the ranks' partitions."""
        group = self._process_group()
        owned = [[p for p in pieces if p.param in self.averaged] for pieces in self._owned_pieces()]
        whole = {index: self._empty_gradient(index) for index in sorted(self.averaged)}
        for dtype in sorted({grad.dtype for grad in whole.values()}, key=str):
            parts = [[p for p in pieces if whole[p.param].dtype == dtype] for pieces in owned]
            own = parts[dist.get_rank(group=group)]
            width = max(sum(piece.numel for piece in pieces) for pieces in parts)
            flat = torch.zeros(width, dtype=dtype, device=self.engine.device)
            for at, piece in _offsets(own):
                flat.narrow(0, at, piece.numel).copy_(self._slot(piece))
            gathered = torch.empty(width * len(parts), dtype=dtype, device=self.engine.device)
            dist.all_gather_into_tensor(gathered, flat, group=group)
            for rank, pieces in enumerate(parts):
                for at, piece in _offsets(pieces):
                    target = whole[piece.param].view(-1).narrow(0, piece.start, piece.numel)
                    target.copy_(gathered.narrow(0, rank * width + at, piece.numel))
        return whole

    def _to_show(self) -> dict[int, Tensor]:
        """The whole averaged gradients in memory that is not used for anything else while the user may have it."""
        return self._whole()

    def _empty_gradient(self, index: int) -> Tensor:
        param: Any = self.params[index]
        shape = getattr(param, "ds_shape", param.shape)
        return torch.empty(shape, dtype=sum_dtype_of(param), device=self.engine.device)

    def _keep(self, whole: dict[int, Tensor]) -> None:
        """Write this rank's pieces of whole gradients, which are scaled, to where the step finds them."""
        for piece in self._owned_pieces()[dist.get_rank(group=self._process_group())]:
            grad = whole.get(piece.param)
            if grad is None:
                self._slot(piece).zero_()
            else:
                self._slot(piece).copy_(grad.reshape(-1).narrow(0, piece.start, piece.numel))

    def _keep_some(self, whole: dict[int, Tensor]) -> None:
        """The same for some of the pending gradients, which leaves the others alone."""
        for piece in self._own(whole):
            self._slot(piece).copy_(whole[piece.param].reshape(-1).narrow(0, piece.start, piece.numel))

    def step_whole_tensors(self) -> None:
        """Let the torch optimizer have each parameter whole.

        Raises:
            ValueError: If the partitions do not allow it; nothing has been trained.
        """
        raise ValueError(
            f"`{type(self.optimizer.optimizer).__name__}` needs whole tensors, and ZeRO partitions the flattened"
            f" parameters here: `{type(self.optimizer).__name__}`. Use stage 0, or stage 2."
        )

    def go_on_as(self, previous: Any) -> None:
        """Take the place of another accumulation of the same engine."""
        self.guard, self.local_sums.until_step = previous.guard, previous.local_sums.until_step
        self.shown.take_over(previous.shown)

    def give_back_optimizers(self) -> None:
        """The fit has ended: leave the torch optimizers as they came, or mark them as used up."""
        own: Any = self.torch_optimizer  # type: ignore[attr-defined]
        give_back(own, own is not self.optimizer, (self.mixin, EvaluatesAgain))  # type: ignore[attr-defined]
        end_marks(self.engine.user_groups.replaced)

    def split_pieces(self) -> dict[int, dict[str, Tensor]]:
        """The views that the torch optimizer steps one by one, by ``id`` of the flat tensor and name."""
        names = {number: name for name, number in self._numbers().items()}
        cut = self.split_steps.pieces  # type: ignore[attr-defined]
        return {
            key: {names[index]: piece for index, piece in pieces.items() if index in names}
            for key, pieces in cut.items()
        }

    def _numbers(self) -> dict[str, int]:
        """The index of each parameter of the module: others may have left it, or come, since the fit began."""
        named = self.engine.module.named_parameters()
        return {name: self.index[id(param)] for name, param in named if id(param) in self.index}

    def _stretches(self) -> list[tuple[Tensor, list[Stretch]]]:
        """The flat tensors that the torch optimizer updates, and which parameters lie in them."""
        from lightning_zeroplus.engine.state.layout import slots

        numbers = self._numbers()
        stretches = []
        for slot in slots(self.engine):
            if slot.group is not None:
                here = {piece.name: piece for piece in slot.pieces}
                stretches.append(
                    (
                        slot.tensor,
                        [
                            Stretch(numbers[name], here[name].offset, here[name].numel)
                            if name in here
                            else Stretch(numbers[name], 0, 0)
                            for name in slot.members
                        ],
                    )
                )
        return stretches


def _offsets(pieces: Iterable[Piece]) -> list[tuple[int, Piece]]:
    placed, at = [], 0
    for piece in pieces:
        placed.append((at, piece))
        at += piece.numel
    return placed
