"""Operators that CUDA has and the CPU has not: the fused cells of recurrent networks, and the choice of a CTC loss.

Without cuDNN, torch computes an LSTM, a GRU and their cells on a GPU by fused cells. Here each is made of the operators
that it fuses. Nothing is imported from the package: this file runs before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

_Biases = tuple[Tensor | None, Tensor | None]
_library: Library | None = None


def install() -> None:
    """Register the operators for the device. Nothing is undone: the process is for this."""
    global _library
    _library = Library("aten", "IMPL")
    for name, function in (
        ("_thnn_fused_gru_cell", _gru_cell),
        ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
        ("_thnn_fused_lstm_cell", _lstm_cell),
        ("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward),
        *((f"_use_{library}_ctc_loss{args}", _no) for library in ("cudnn", "miopen") for args in ("", ".Tensor")),
    ):
        _library.impl(name, function, "CUDA")


def _no(*_: object) -> bool:
    return False


def _plus(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The next hidden state, and what the backward needs."""
    of_input, of_hidden = _plus(input_gates, input_bias).chunk(3, 1), _plus(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (torch.sigmoid(left + right) for left, right in zip(of_input[:2], of_hidden[:2], strict=True))
    new = torch.tanh(of_input[2] + of_hidden[2] * reset)
    return (hx - new) * update + new, torch.cat([reset, update, new, hx, of_hidden[2]], 1)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Gradients of the input's gates, of the hidden state's gates, of the hidden state, and of both biases."""
    reset, update, new, hx, of_hidden = workspace.chunk(5, 1)
    of_update = grad * (hx - new) * update * (1 - update)
    of_new = grad * (1 - update) * (1 - new * new)
    of_reset = of_new * of_hidden * reset * (1 - reset)
    of_input_gates = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden_gates = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases: _Biases = (of_input_gates.sum(0), of_hidden_gates.sum(0)) if has_bias else (None, None)
    return of_input_gates, of_hidden_gates, grad * update, *biases


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next hidden state, the next cell state, and what the backward needs."""
    gates = _plus(input_gates, input_bias) + _plus(hidden_gates, hidden_bias)
    into, forget, cell, out = gates.chunk(4, 1)
    into, forget, cell, out = torch.sigmoid(into), torch.sigmoid(forget), torch.tanh(cell), torch.sigmoid(out)
    cy = forget * cx + into * cell
    return out * torch.tanh(cy), cy, torch.cat([into, forget, cell, out], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the gates, of the cell state, and of the bias."""
    into, forget, cell, out = workspace.chunk(4, 1)
    hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    tanh = torch.tanh(cy)
    of_cy = hy * out * (1 - tanh * tanh)
    of_cy = of_cy if grad_cy is None else of_cy + grad_cy
    of_gates = torch.cat(
        [
            of_cy * cell * into * (1 - into),
            of_cy * cx * forget * (1 - forget),
            of_cy * into * (1 - cell * cell),
            hy * tanh * out * (1 - out),
        ],
        1,
    )
    return of_gates, of_cy * forget, of_gates.sum(0) if has_bias else None
