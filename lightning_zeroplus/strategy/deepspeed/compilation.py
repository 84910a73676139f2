"""``ZeroPlusStrategy(compile=...)``: the options, and the modules to compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

if TYPE_CHECKING:
    import lightning.pytorch as pl

BACKENDS = ("inductor", "eager")
_REMEDY = "Give True, False, or a dict with some of `backend`, `schedule` and `dynamic`."


class CompileOptions(NamedTuple):
    """How to compile.

    Attributes:
        backend: ``"inductor"``, or ``"eager"``, which generates no code.
        schedule: Pairs of an optimizer step and the names of DeepCompile's passes from then on; None: DeepCompile's
            own schedule.
        dynamic: As in ``torch.compile``.
    """

    backend: str = "inductor"
    schedule: list[tuple[int, list[str]]] | None = None
    dynamic: bool | None = None


def resolve_compile(compile: bool | Mapping[str, Any], stage: int) -> CompileOptions | None:
    """The options; None: do not compile.

    Raises:
        MisconfigurationException: If the argument is wrong, naming its wrong part.
    """
    if compile is False or compile is None:
        return None
    if stage == 0:
        raise MisconfigurationException(
            "`compile` needs ZeRO stage 1, 2 or 3, not 0. At stage 0 call `self.model.compile()` in `configure_model`."
        )
    given = {} if compile is True else compile
    if not isinstance(given, Mapping) or given.keys() - set(CompileOptions._fields):
        raise MisconfigurationException(f"`compile={compile!r}` is not understood. {_REMEDY}")
    options = CompileOptions(**given)
    if options.backend not in BACKENDS:
        raise MisconfigurationException(f'`compile["backend"]` must be "inductor" or "eager", not {options.backend!r}.')
    if options.dynamic not in (None, True, False):
        raise MisconfigurationException(f'`compile["dynamic"]` must be True, False or None, not {options.dynamic!r}.')
    if options.schedule is None:
        return options
    try:
        given_schedule: Any = options.schedule  # a single pass may stand for a list of one
        schedule = [(step, [each] if isinstance(each, str) else list(each)) for step, each in given_schedule]
    except (TypeError, ValueError):
        schedule = []
    if not schedule or schedule[0][0] != 0 or not all(isinstance(step, int) for step, _ in schedule):
        raise MisconfigurationException(
            '`compile["schedule"]` must be a list of pairs of an optimizer step and a list of passes, beginning with'
            f" step 0, such as [(0, ['zero3_compile'])], not {options.schedule!r}."
        )
    return options._replace(schedule=schedule)


def regions(module: nn.Module) -> Iterator[nn.Module]:
    """The modules to compile: the children of a LightningModule that have parameters.

    ``training_step`` itself runs in Python, with its logging and its optimizer. For containers without a forward, such
    as ``ModuleList``, their children are compiled.
    """
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        if type(child).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward):
            yield from regions(child)
        else:
            yield child


def take_over(module: pl.LightningModule) -> CompileOptions | None:
    """Undo ``torch.compile(module)``, which Lightning refuses for DeepSpeed strategies, and return its options.

    Returns:
        The options of ``torch.compile``; None if the module was not compiled.

    Raises:
        MisconfigurationException: If it was compiled with a backend that DeepCompile does not have.
    """
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return None
    backend: Any = context["dynamo_ctx"].callback
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", str(backend))
    if name not in BACKENDS:
        raise MisconfigurationException(
            f"The module was compiled with backend {name!r}, and DeepCompile has {' and '.join(BACKENDS)} only."
            " Pass the uncompiled module to the Trainer, with `ZeroPlusStrategy(compile=True)`."
        )
    to_uncompiled(module)
    return CompileOptions(backend=name, dynamic=getattr(context["dynamo_ctx"], "_dynamic", None))
