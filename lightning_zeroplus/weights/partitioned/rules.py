"""What torch functions need of a parameter: its values, its shape, or neither.

A function that is in none of these tables counts as one that needs values.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class Asks(Enum):
    """What a torch function needs of a parameter."""

    NOTHING = 0
    SHAPE = 1
    LIKENESS = 2
    TEXT = 3
    VALUES = 4


_ATTRIBUTES = {
    **dict.fromkeys(("shape", "ndim", "nbytes"), Asks.SHAPE),
    **dict.fromkeys(("data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__", ""), Asks.VALUES),
}
_METHODS = {
    **dict.fromkeys(
        (
            "__dir__",
            "_backward_hooks",
            "_has_compatible_shallow_copy_type",
            "_is_view",
            "backward",
            "can_cast",
            "element_size",
            "get_device",
            "grad",  # of torch.autograd
            "has_names",
            "is_complex",
            "is_conj",
            "is_floating_point",
            "is_inference",
            "is_neg",
            "is_signed",
            "new",
            "new_empty",
            "new_full",
            "new_ones",
            "new_tensor",
            "new_zeros",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "requires_grad_",
            "result_type",
            "retain_grad",
        ),
        Asks.NOTHING,
    ),
    **dict.fromkeys(
        (
            "__len__",
            "dim",
            "is_contiguous",
            "is_same_size",
            "ndimension",
            "nelement",
            "numel",
            "size",
            "stride",
            "storage_offset",
        ),
        Asks.SHAPE,
    ),
    **dict.fromkeys(
        ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"),
        Asks.LIKENESS,
    ),
    **dict.fromkeys(("__repr__", "__format__", "__str__"), Asks.TEXT),
}
#: ``module.to(...)`` and its relatives, which convert every parameter.
CONVERSIONS = frozenset(("to", "cpu", "cuda", "xpu", "half", "float", "double", "bfloat16", "type"))
#: In-place functions of ``torch.nn.init`` whose result does not depend on the weight.
FILLS = frozenset(("uniform_", "normal_", "fill_", "zero_"))


def asks(func: Callable[..., Any], args: tuple[Any, ...]) -> Asks:
    """What ``func`` needs of its arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _ATTRIBUTES.get(getattr(getattr(func, "__self__", None), "__name__", ""), Asks.NOTHING)
    if name == "__set__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return Asks.VALUES if attribute in ("data", "real", "imag", "") else Asks.NOTHING
    if name == "type" and len(args) == 1:
        return Asks.NOTHING
    return _METHODS.get(name, Asks.VALUES)
