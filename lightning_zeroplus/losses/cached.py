"""GradCache for manual optimization: a loss over all embeddings of a batch, with the activations of one chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import get_device_states, set_device_states

if TYPE_CHECKING:
    import lightning.pytorch as pl

Encoder = Callable[[Any], Tensor]


class CachedLoss:
    """Computes a loss over all embeddings of a batch, with the activations of one chunk at a time.

    GradCache (`Gao et al., 2021 <https://arxiv.org/abs/2101.06983>`_): every chunk is encoded without a graph, the loss
    and its gradient with respect to the embeddings are computed once, and every chunk is encoded again, with the same
    random numbers, to backpropagate its part of that gradient. The gradients equal the gradients of the plain loss,
    also for the loss's own parameters, for example a temperature. Under the strategies of this package they are reduced
    once::

        self.loss = CachedLoss(contrastive_loss, chunk_size=32)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.loss(self, self.encoder, batch["query"], batch["document"])
            optimizer.step()
            optimizer.zero_grad()

    Args:
        loss_fn: Takes one tensor of embeddings per column, each of shape ``(rows, ...)``, and returns a scalar.
        chunk_size: Number of rows to encode at a time; one number, or one per column. The last chunk may be smaller.
        cross_rank: Pass ``loss_fn`` the embeddings of all ranks, in rank order, for example for in-batch negatives.
            All ranks then compute the same loss, and the gradient equals the gradient of one process with all rows.

    Raises:
        ValueError: If ``chunk_size`` is not positive, or an argument has the wrong type.
    """

    def __init__(
        self, loss_fn: Callable[..., Tensor], chunk_size: int | Sequence[int] = 32, cross_rank: bool = False
    ) -> None:
        if not callable(loss_fn):
            raise ValueError(f"`loss_fn` must be a function of tensors of embeddings, not {loss_fn!r}.")
        if not isinstance(cross_rank, bool):
            raise ValueError(f"`cross_rank` must be True or False, not {cross_rank!r}.")
        several = isinstance(chunk_size, Sequence) and not isinstance(chunk_size, (str, bytes))
        sizes = list(chunk_size) if several else [chunk_size]  # type: ignore[arg-type]
        if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
            raise ValueError(f"`chunk_size` must be a positive integer, or one per column, not {chunk_size!r}.")
        self.loss_fn = loss_fn
        self.chunk_size = chunk_size
        self.cross_rank = cross_rank

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
            MisconfigurationException: In automatic optimization.
        """
        parts = self._columns(encoder, columns)
        if not torch.is_grad_enabled():
            return self._loss([torch.cat([part.encode(chunk) for chunk in part.chunks()]) for part in parts])[0]
        if module.automatic_optimization:
            raise MisconfigurationException(
                "`CachedLoss` runs backwards itself: set `self.automatic_optimization = False` in the LightningModule."
            )
        embeddings: list[Tensor] = []
        states: list[list[_RandomState]] = []
        for part in parts:
            encoded: list[Tensor] = []
            states.append([])
            with torch.no_grad():
                for chunk in part.chunks():
                    states[-1].append(_RandomState.now(chunk, module.device))
                    encoded.append(part.encode(chunk))
            embeddings.append(torch.cat(encoded).requires_grad_())
        loss, ranks = self._loss(embeddings)
        scale = _loss_scale(module)
        with _window(module.trainer.strategy):
            if _has_other_leaves(loss, embeddings):
                module.manual_backward(loss)  # the loss has parameters of its own, for example a temperature
            else:
                (loss.float() * scale).backward()  # manual_backward() under DDP must reach a parameter
            for part, column_states, embedding in zip(parts, states, embeddings, strict=True):
                if embedding.grad is not None:
                    # fp16 needs the scale, or small gradients underflow. manual_backward() below scales again: divide.
                    self._carry(module, part, column_states, embedding.grad.float() * (ranks / scale))
        return loss.detach()

    def _columns(self, encoder: Encoder | Sequence[Encoder], columns: Sequence[Any]) -> list[_Column]:
        count = len(columns)
        if count == 0:
            raise ValueError("`CachedLoss` needs at least one column.")
        sizes = [self.chunk_size] * count if isinstance(self.chunk_size, int) else list(self.chunk_size)
        encoders = [encoder] * count if callable(encoder) else list(encoder)
        for name, values in (("chunk_size", sizes), ("encoder", encoders)):
            if len(values) != count:
                raise ValueError(f"`{name}` has {len(values)} entries for {count} columns: give one, or one each.")
        return [_Column(number, *each) for number, each in enumerate(zip(encoders, columns, sizes, strict=True))]

    def _loss(self, embeddings: list[Tensor]) -> tuple[Tensor, int]:
        """The loss, and the factor of its gradient that undoes the average over the ranks."""
        ranks = dist.get_world_size() if self.cross_rank and dist.is_initialized() else 1
        if ranks > 1:
            counts = _rows_of_all_ranks([embedding.shape[0] for embedding in embeddings], embeddings[0].device)
            embeddings = [_of_all_ranks(*each) for each in zip(embeddings, counts, strict=True)]
        loss = self.loss_fn(*embeddings)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"`loss_fn` must return a scalar tensor, not {getattr(loss, 'shape', loss)!r}.")
        return loss, ranks

    def _carry(self, module: Any, part: _Column, states: list[_RandomState], grad: Tensor) -> None:
        for chunk, state, chunk_grad in zip(part.chunks(), states, grad.split(part.chunk_size), strict=True):
            with state.again():
                embedding = part.encode(chunk)
            if not embedding.requires_grad:
                return  # a frozen column
            module.manual_backward((embedding.float() * chunk_grad).sum())


class _Column:
    """The inputs of one column, in chunks."""

    def __init__(self, number: int, encoder: Encoder, inputs: Any, chunk_size: int) -> None:
        rows = {leaf.shape[0] if leaf.ndim else None for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        if len(rows) != 1 or None in rows or 0 in rows:
            raise ValueError(
                f"Column {number} of `CachedLoss` must hold tensors with the same positive number of rows, not {rows}."
            )
        self.number = number
        self.encoder = encoder
        self.inputs = inputs
        self.chunk_size = chunk_size
        self.rows = int(next(iter(rows)) or 0)

    def chunks(self) -> Iterator[Any]:
        for start in range(0, self.rows, self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            yield tree_map(lambda leaf, rows=rows: leaf[rows] if isinstance(leaf, Tensor) else leaf, self.inputs)

    def encode(self, chunk: Any) -> Tensor:
        embedding = self.encoder(chunk)
        rows = next(leaf.shape[0] for leaf in tree_leaves(chunk) if isinstance(leaf, Tensor))
        if embedding.ndim == 0 or embedding.shape[0] != rows:
            raise ValueError(
                f"The encoder of column {self.number} returned shape {tuple(embedding.shape)} for {rows} rows: return"
                " one embedding per row."
            )
        return embedding


class _RandomState(NamedTuple):
    """The states of the random number generators of the CPU, of a chunk's devices and of the module's device."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, chunk: Any, device: torch.device) -> _RandomState:
        # An encoder may move the chunk, a tokenizer's dictionary of CPU tensors for example, to its own device.
        return cls(torch.get_rng_state(), *get_device_states(*tree_leaves(chunk), torch.empty(0, device=device)))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again within; afterwards restore the generators."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


def _rows_of_all_ranks(rows: list[int], device: torch.device) -> list[list[int]]:
    """For each column, the numbers of rows of all ranks, in rank order. The host waits for the device once."""
    own = torch.tensor(rows, device=device)
    every = own.new_empty(dist.get_world_size(), len(rows))
    dist.all_gather_into_tensor(every.view(-1), own)
    counts: list[list[int]] = every.T.tolist()
    return counts


def _of_all_ranks(embedding: Tensor, counts: list[int]) -> Tensor:
    """The embeddings of all ranks, in rank order. Only this rank's embeddings are part of the graph."""
    # all_gather needs equal shapes, and the last batch of an epoch may be smaller on some ranks.
    padded = embedding.new_zeros(max(counts), *embedding.shape[1:])
    padded[: embedding.shape[0]] = embedding.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    parts = [part[:count] for part, count in zip(parts, counts, strict=True)]
    parts[dist.get_rank()] = embedding
    return torch.cat(parts)


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


def _window(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    if not hasattr(strategy, "coalesce") or strategy.window.is_open:
        return contextlib.nullcontext()
    return strategy.coalesce()
