"""GradCache for manual optimization: a loss over all embeddings of a batch, with the activations of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zeroplus.losses.columns import Column, Encoder
from lightning_zeroplus.losses.ranks import number_of_ranks, of_all_ranks, tell_all, with_all_embeddings
from lightning_zeroplus.losses.reducing import check_reduction, one_reduction
from lightning_zeroplus.losses.replay import RandomState, devices_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


class CachedLoss:
    """Computes a loss over all embeddings of a batch, with the activations of one chunk at a time.

    GradCache (`Gao et al., 2021 <https://arxiv.org/abs/2101.06983>`_): every chunk is encoded without a graph, the loss
    and its gradient with respect to the embeddings are computed once, and every chunk is encoded again, with the same
    random numbers, to backpropagate its part of that gradient. The gradients equal the gradients of the plain loss,
    also for the loss's own parameters, for example a temperature. Under the strategies of this package they are reduced
    once, and under DDP, too::

        self.loss = CachedLoss(contrastive_loss, chunk_size=32)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.loss(self, self.encoder, batch["query"], batch["document"])
            optimizer.step()
            optimizer.zero_grad()

    Args:
        loss_fn: Takes one tensor of embeddings per column, each of shape ``(rows, ...)``, and returns a scalar.
        chunk_size: Number of rows to encode at a time; one number, or one per column. The last chunk may be smaller.
            None: any number in columns with ``chunk_tokens``, else 32.
        cross_rank: Pass ``loss_fn`` the embeddings of all ranks, in rank order, for example for in-batch negatives.
            All ranks then compute the same loss, and the gradient equals the gradient of one process with all rows.
            Large batches need less memory with False and :func:`~lightning_zeroplus.losses.info_nce`, which gathers by
            itself.
        chunk_tokens: Number of tokens to encode at a time, with padding; one number, or one per column, None for a
            column without. The column is a dictionary with an ``attention_mask`` of shape ``(rows, tokens)``. Its
            rows are encoded in the order of their lengths, without the padding behind a chunk's longest row: integer
            tensors of the mask's shape are cut. A row with more tokens is a chunk of its own.

    Raises:
        ValueError: If a size is not positive, or an argument has the wrong type.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        chunk_size: int | Sequence[int] | None = None,
        cross_rank: bool = False,
        chunk_tokens: int | Sequence[int | None] | None = None,
    ) -> None:
        if not callable(loss_fn):
            raise ValueError(f"`loss_fn` must be a function of tensors of embeddings, not {loss_fn!r}.")
        if not isinstance(cross_rank, bool):
            raise ValueError(f"`cross_rank` must be True or False, not {cross_rank!r}.")
        if chunk_size is not None and not _are_sizes(chunk_size):
            raise ValueError(f"`chunk_size` must be a positive integer, or one per column, not {chunk_size!r}.")
        if chunk_tokens is not None and not _are_sizes(chunk_tokens, optional=True):
            raise ValueError(f"`chunk_tokens` must be a positive integer, or one per column, not {chunk_tokens!r}.")
        self.loss_fn = loss_fn
        self.chunk_size = chunk_size
        self.cross_rank = cross_rank
        self.chunk_tokens = chunk_tokens

    def __call__(self, module: pl.LightningModule, encoder: Encoder | Sequence[Encoder], *columns: Any) -> Tensor:
        """Compute the loss and, where gradients are enabled, differentiate it.

        Args:
            module: The LightningModule that trains, in manual optimization.
            encoder: Maps a chunk of a column to its embeddings, one per row. One encoder for all columns, or one per
                column. Frozen columns, whose embeddings require no gradient, are not differentiated.
            *columns: The inputs: a tensor, or any nesting of tensors, with one row per sample.

        Returns:
            The loss, a detached scalar.

        Raises:
            ValueError: If columns, encoders and chunk sizes do not match, before anything is computed; if an encoder
                returns another number of rows, or the loss is not a scalar.
            MisconfigurationException: In automatic optimization, or under DDP with ``static_graph=True``.
        """
        parts = self._columns(encoder, columns)
        is_training = torch.is_grad_enabled()
        if is_training and module.automatic_optimization:
            raise MisconfigurationException(
                "`CachedLoss` runs backwards itself: set `self.automatic_optimization = False` in the LightningModule."
            )
        if is_training:
            check_reduction(module)
        rows = self._meet(module, parts, is_training)
        embeddings: list[Tensor] = []
        states: list[list[RandomState]] = []
        devices = {module.device} | {param.device for param in module.parameters()}
        for part in parts:
            states.append([])
            with torch.no_grad():
                known = devices | devices_of(part.encoder, part.inputs)
                embeddings.append(part.join(list(_first_pass(part, known, states[-1]))))
        if not is_training:
            return self._loss(embeddings, rows)[0]
        loss, ranks = self._loss([embedding.requires_grad_() for embedding in embeddings], rows)
        scale = _loss_scale(module)
        with one_reduction(module):
            if _has_other_leaves(loss, embeddings):
                module.manual_backward(loss)  # the loss has parameters of its own, for example a temperature
            else:
                (loss.float() * scale).backward()  # manual_backward() under DDP must reach a parameter
            for part, column_states, embedding in zip(parts, states, embeddings, strict=True):
                if embedding.grad is not None:
                    # fp16 needs the scale, or small gradients underflow. manual_backward() below scales again: divide.
                    _second_pass(module, part, column_states, embedding.grad.float() * (ranks / scale))
        return loss.detach()

    def _columns(self, encoder: Encoder | Sequence[Encoder], columns: Sequence[Any]) -> list[Column]:
        count = len(columns)
        if count == 0:
            raise ValueError("`CachedLoss` needs at least one column.")
        sizes, tokens = _one_each(self.chunk_size, count), _one_each(self.chunk_tokens, count)
        encoders = [encoder] * count if callable(encoder) else list(encoder)
        for name, values in (("chunk_size", sizes), ("chunk_tokens", tokens), ("encoder", encoders)):
            if len(values) != count:
                raise ValueError(f"`{name}` has {len(values)} entries for {count} columns: give one, or one each.")
        sizes = [32 if each == (None, None) else each[0] for each in zip(sizes, tokens, strict=True)]
        each = zip(encoders, columns, sizes, tokens, strict=True)
        return [Column(number, *arguments) for number, arguments in enumerate(each)]

    def _meet(self, module: pl.LightningModule, parts: list[Column], is_training: bool) -> list[list[int]] | None:
        """Agree on the number of chunks, where each chunk is a meeting of the ranks.

        Returns:
            For ``cross_rank`` the rows of each column on all ranks.
        """
        by_tokens = any(tokens is not None for tokens in _one_each(self.chunk_tokens, len(parts)))
        agree = is_training and (by_tokens or _gathers_weights(module))
        if number_of_ranks() == 1 or not (agree or self.cross_rank):
            return None
        numbers = [part.rows for part in parts] + [part.count for part in parts]
        told = tell_all(numbers, _root_device(module))
        for part, counts in zip(parts, told[len(parts) :], strict=True):
            part.runs = max(counts)
        return told[: len(parts)] if self.cross_rank else None

    def _loss(self, embeddings: list[Tensor], rows: list[list[int]] | None) -> tuple[Tensor, int]:
        """The loss, and the factor of its gradient that undoes the average over the ranks."""
        ranks = 1
        if rows is not None:
            ranks = number_of_ranks()
            embeddings = [_with_own_graph(*each) for each in zip(embeddings, rows, strict=True)]
        if self.cross_rank:
            with with_all_embeddings():
                loss = self.loss_fn(*embeddings)
        else:
            loss = self.loss_fn(*embeddings)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"`loss_fn` must return a scalar tensor, not {getattr(loss, 'shape', loss)!r}.")
        return loss, ranks


def _are_sizes(given: Any, optional: bool = False) -> bool:
    several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    sizes = [size for size in given if not optional or size is not None] if several else [given]
    return len(sizes) > 0 and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)


def _one_each(given: Any, count: int) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given] * count


def _first_pass(part: Column, devices: set[torch.device], states: list[RandomState]) -> Iterator[Tensor]:
    """Encode all chunks, and remember their random numbers."""
    for number in range(part.count):
        states.append(RandomState.now(devices))
        yield part.encode(number)
    for number in range(part.count, part.runs):
        # The others have more chunks, and need this rank for their weights.
        with states[-1].again():
            part.encode(number)


def _second_pass(module: Any, part: Column, states: list[RandomState], grad: Tensor) -> None:
    """Encode all chunks again, and carry their parts of the gradient on."""
    for number in range(part.runs):
        with states[min(number, part.count - 1)].again():
            embedding = part.encode(number)
        if not embedding.requires_grad:
            return  # a frozen column
        weight = part.part(grad, number) if number < part.count else embedding.new_zeros((), dtype=torch.float32)
        module.manual_backward((embedding.float() * weight).sum())


def _with_own_graph(embedding: Tensor, counts: list[int]) -> Tensor:
    """The embeddings of all ranks, in rank order. Only this rank's embeddings are part of the graph."""
    parts = list(of_all_ranks(embedding, counts).split(counts))
    parts[dist.get_rank()] = embedding
    return torch.cat(parts)


def _gathers_weights(module: Any) -> bool:
    """Whether a forward gathers weights from all ranks: at stage 3, and under FSDP2."""
    return any(hasattr(param, "ds_id") or isinstance(param, DTensor) for param in module.parameters())


def _root_device(module: Any) -> torch.device:
    """Where the backend's collectives take tensors from."""
    trainer = getattr(module, "_trainer", None)
    device: torch.device = module.device if trainer is None else trainer.strategy.root_device
    return device


def _has_other_leaves(loss: Tensor, known: list[Tensor]) -> bool:
    """Whether the gradient of ``loss`` reaches a leaf that is not in ``known``."""
    seen = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is tensor for tensor in known):
            return True
        nodes.extend(function for function, _ in node.next_functions)
    return False


def _loss_scale(module: Any) -> float:
    """The factor by which ``manual_backward()`` multiplies a loss."""
    engine = module.trainer.strategy.model
    if hasattr(engine, "loss_scale_factor"):
        return float(engine.loss_scale_factor())
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())
