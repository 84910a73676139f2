"""DeepCompile on an engine, with the engine's own reduction; undone when the engine closes.

Upstream removes the gradient hooks and lets the compiled graphs reduce into buffers of their own. There, the gradient
of a parameter that is used in a skipped frame is never reduced. If a graph runs twice in a backward, or two graphs
share a parameter, the last gradient overwrites the others. Here every gradient, from a compiled graph or not, goes to
:meth:`~lightning_zeroplus.engine.accumulation.GradientAccumulation.receive`, and so through the same buckets, windows
and dtypes as without a compiler.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.compile import backend as upstream_backend
from deepspeed.compile import graph_param, list_schedule, util
from deepspeed.compile.passes import prefetch, selective_gather, zero3_compile, zero_1_and_2_compile
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from torch._dynamo.guards import GuardBuilder
from torch._inductor.scheduler import Scheduler
from torch._subclasses import FakeTensorMode

from lightning_zeroplus.engine.compile import cpu_backend, native_backend
from lightning_zeroplus.engine.compile.calls import SameCalls
from lightning_zeroplus.engine.compile.dynamo import hide_again
from lightning_zeroplus.engine.compile.eager_frames import EagerFrames
from lightning_zeroplus.engine.compile.graphs import (
    drop_parameters_without_gradient,
    isolate_gradient_nodes,
    keeping_inputs,
    users_of,
    with_keyword_arguments,
)
from lightning_zeroplus.engine.compile.hooks import without_missing_gradients
from lightning_zeroplus.engine.compile.meter import GatherMeter
from lightning_zeroplus.engine.compile.patches import Patches
from lightning_zeroplus.engine.compile.profiling import alone, cpu_profiling
from lightning_zeroplus.gradients.dtype import expected_grad_dtype

logger = logging.getLogger(__name__)

#: A DeepCompile schedule: pairs of an optimizer step and the passes from then on, by name or as functions.
Schedule = Sequence[tuple[int, Sequence[Any]]]

# DeepCompile keeps its state in module globals: one engine at a time.
_open: weakref.ref[CompileSession] | None = None


def check_can_compile(engine: Any, backend: str, schedule: Schedule | None) -> None:
    """Refuse what DeepCompile cannot do, before anything is changed.

    Raises:
        ValueError: Naming the argument, its value and the remedy.
    """
    if backend not in ("inductor", "eager"):
        raise ValueError(f'`backend` must be "inductor" or "eager", not {backend!r}.')
    if get_accelerator().device_name() != "cuda":
        _register_passes()
    for step, passes in schedule or ():
        unknown = [name for name in passes if isinstance(name, str) and name not in upstream_backend.opt_passes]
        if unknown:
            raise ValueError(
                f"`schedule`: unknown pass {unknown[0]!r} at step {step}. On this accelerator there are"
                f" {', '.join(upstream_backend.opt_passes)}."
            )
    if engine.gradient_accumulation is None:
        raise ValueError("An engine without an optimizer cannot be compiled.")
    if engine.zero_optimization_stage() not in (1, 2, 3):
        raise ValueError(f"DeepCompile needs ZeRO stage 1, 2 or 3, not {engine.zero_optimization_stage()}.")
    if isinstance(engine.optimizer, BF16_Optimizer):
        raise ValueError(
            "DeepCompile does not support bf16 with fp32 accumulation (`accumulate_dtype`, `grad_accum_dtype`) at ZeRO"
            " stage 1. Use stage 2."
        )


def _register_passes() -> None:
    """Upstream registers passes by name for CUDA only; on CPU, those that need no offloading."""
    for name, function, contract in (
        (zero_1_and_2_compile.NAME_Z1, zero_1_and_2_compile.add_z1_reduce, zero_1_and_2_compile.CONTRACT_Z1),
        (zero_1_and_2_compile.NAME_Z2, zero_1_and_2_compile.add_z2_reduce, zero_1_and_2_compile.CONTRACT_Z2),
        (zero3_compile.NAME, zero3_compile.add_z3_gather_release, zero3_compile.CONTRACT),
        (prefetch.NAME, prefetch.schedule_prefetch, prefetch.CONTRACT),
        (selective_gather.NAME, selective_gather.selective_gather, selective_gather.CONTRACT),
    ):
        if name not in upstream_backend.opt_passes:
            upstream_backend.register_compile_pass(name, function, contract)


class SkippedFrames(NamedTuple):
    """What Dynamo has left to Python.

    Attributes:
        modules: The modules whose parameters were gathered in Python (stage 3), and the bytes gathered for each so far.
        reasons: The modules that the ranks called differently, and Dynamo's reasons, which may concern any module.
    """

    modules: dict[str, int]
    reasons: list[str]


class CompileSession:
    """The compiled state of one engine, from :meth:`start` to :meth:`close`.

    Args:
        engine: The engine; its optimizer is ready.
        regions: The modules to compile, each by itself; the rest of the engine's module runs in Python.

    Attributes:
        eager: Gathers the parameters of skipped frames at stage 3; else None.
        meter: Counts the bytes gathered in compiled and skipped frames.
    """

    def __init__(self, engine: Any, regions: Sequence[nn.Module]) -> None:
        self.engine = engine
        self.regions = list(regions)
        self.eager: EagerFrames | None = None
        self.meter = GatherMeter()
        self._accumulation = engine.gradient_accumulation
        self._patches = Patches()
        self._native = get_accelerator().device_name() == "cuda"
        self._handle: Any = None
        self._calls: SameCalls | None = None
        self._reported = False

    # -- start and close --------------------------------------------------------------------------------------------

    def start(self, compile_module: Callable[[], None]) -> None:
        """Compile the regions; closes a session of another engine.

        Args:
            compile_module: Upstream's ``compile()`` with bound arguments.
        """
        global _open
        previous = _open() if _open is not None else None
        if previous is not None:
            previous.close()
        _open = weakref.ref(self)
        try:
            self._protect_process()
            self._handle = self._make_handle()
            if self._accumulation.partitions_parameters:
                self._calls = SameCalls()
            with self._keeping_reduction():
                compile_module()
            self._set_up_stage3()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Undo everything; the engine's module runs in Python again."""
        global _open
        if _open is not None and _open() is self:
            _open = None
        if self.eager is not None:
            self.eager.close()
            self.eager = None
        if self._handle is not None:
            self.engine._deactivate_deepcompile()
            self._handle = None
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        for region in self.regions:
            region._compiled_call_impl = None
        self._patches.undo()
        torch._dynamo.reset()

    def _protect_process(self) -> None:
        patches = self._patches
        patches.keep(torch._dynamo.variables.builder, "wrap_to_fake_tensor_and_record")
        patches.keep(GuardBuilder, "TENSOR_MATCH")
        patches.keep(FakeTensorMode, "from_tensor")
        patches.keep(Scheduler, "dead_node_elimination")
        patches.keep(Scheduler, "is_dc_patched")
        patches.keep(deepspeed.utils.nvtx, "enable_nvtx")
        patches.keep(util, "dc_handle")
        for hooks in (util.pre_backward_hooks, util.post_backward_hooks):
            patches.call_later(partial(hooks.__setitem__, slice(None), list(hooks)))
        for config, name, value in (
            (torch._inductor.config, "size_asserts", False),
            # With retain_graph=True, a graph may be walked again.
            (torch._functorch.config, "donated_buffer", False),
        ):
            patches.call_later(partial(setattr, config, name, getattr(config, name)))
            setattr(config, name, value)
        for module, name in ((upstream_backend, "log_rank0"), (prefetch, "print_rank_0")):
            patches.replace(module, name, _log)  # upstream prints, which would garble a progress bar
        # Upstream multiplies the sizes of a parameter's dimensions, and fails if there are none.
        patches.replace(graph_param, "reduce", lambda function, sizes: reduce(function, sizes, 1))
        requirements = with_keyword_arguments(list_schedule.get_node_requirements)
        patches.replace(list_schedule, "get_node_requirements", requirements)
        patches.replace(upstream_backend, "run_opt_passes", self._running_passes(upstream_backend.run_opt_passes))

    def _make_handle(self) -> Any:
        if self._native:
            util.dc_handle = native_backend.NativeHandle(util.get_deepcompile_handle(), self._receive, self._patches)
        else:
            util.dc_handle = cpu_backend.CpuHandle(self._receive, self.meter)
            cpu_backend.use(util.dc_handle)
            self._patches.call_later(partial(cpu_backend.use, None))
        return util.dc_handle

    @contextmanager
    def _keeping_reduction(self) -> Iterator[None]:
        """Keep the engine's reduction during upstream's set-up, which removes it."""
        engine, optimizer = self.engine, self.engine.optimizer
        patches = Patches()
        for name, instead in (("_grad_acc_hooks", []), ("ipg_buckets", {})):
            patches.replace(optimizer, name, instead)
        if hasattr(optimizer, "contiguous_gradients"):
            patches.keep(optimizer, "contiguous_gradients")
        patches.replace(engine._config.compile_config, "deepcompile", True)
        patches.replace(engine.module, "compile", self._compile_regions)
        hooks = [(hooks, list(hooks)) for hooks in (util.pre_backward_hooks, util.post_backward_hooks)]
        if not self._accumulation.partitions_parameters:
            self._name_frozen_parameters()
        try:
            yield
        finally:
            patches.undo()
            for added, before in hooks:
                added[:] = before  # upstream's hooks replace the optimizer's gradients by buffers of its own

    def _compile_regions(self, *, backend: Any, **kwargs: Any) -> None:
        leaves = [module for module in self.engine.module.modules() if z3_leaf_module(module)]
        for leaf in leaves:
            # Ranks may use different parameters of a leaf module, and a compiled graph gathers only what it uses.
            self._patches.replace(leaf, "forward", torch.compiler.disable(leaf.forward))
        names = {module: name for name, module in self.engine.module.named_modules()}
        for region in self.regions:
            frame = _frame_of_its_own(names[region], region._call_impl)
            compiled = torch.compile(frame, backend=self._outside_hooks(backend), **kwargs)
            if self._calls is not None:
                compiled = self._calls.guard(names[region], region, compiled)
            region._compiled_call_impl = compiled

    def _name_frozen_parameters(self) -> None:
        # Upstream gives ids to the optimizer's parameters only, but reads the id of every parameter in a graph.
        param: Any
        for index, param in enumerate(self._accumulation.params):
            if not param.requires_grad:
                param.param_id = -1 - index

    def _set_up_stage3(self) -> None:
        engine = self.engine
        if not self._accumulation.partitions_parameters:
            return
        # Upstream switches these off. Dynamo then makes sizes that differ between two modules dynamic, and its guards
        # would read them from a parameter that is not gathered. Upstream restores the values in close().
        torch._dynamo.config.force_parameter_static_shapes = True
        torch._dynamo.config.force_nn_module_property_static_shapes = True
        optimizer = engine.optimizer
        for hook in optimizer._leaf_module_hooks:
            hook.remove()
        # Upstream would gather them after every step, and partition them before the next forward.
        self._patches.replace(optimizer, "persistent_parameters", [])
        self.eager = engine._deepcompile_z3_eager_fallback = EagerFrames(
            engine,
            lambda param, grad: self._accumulation.receive(self._accumulation.index[id(param)], grad),
            expected_grad_dtype,
            int(engine.zero_param_persistence_threshold()),
            self.meter,
        )

    # -- while it runs ------------------------------------------------------------------------------------------------

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Wrap a backward."""
        self._handle.start_backward(True)
        with without_missing_gradients(self._accumulation.params):
            with nullcontext() if self.eager is None else self.eager.backward_context():
                yield

    def parameters_changed(self) -> None:
        """Drop gathered parameters: the optimizer has stepped, or weights were loaded."""
        if self._handle is not None:
            self._handle.invalidate()
        if self.eager is not None:
            self.eager.forget()
            self._report()

    @property
    def skipped_frames(self) -> SkippedFrames:
        """What Dynamo has left to Python since :meth:`start`."""
        modules = {} if self.eager is None else self.eager.modules
        differing = set() if self._calls is None else self._calls.differing
        reasons = [
            f"the ranks called {name or 'the module'!r} with arguments of different shapes or values, which is compiled"
            " at stages 1 and 2 only (pad batches to one shape on all ranks)"
            for name in sorted(differing)
        ]
        reasons += [str(reason).splitlines()[0] for reason in torch._dynamo.utils.counters["unimplemented"]]
        return SkippedFrames({name or "(the module itself)": nbytes for name, nbytes in modules.items()}, reasons)

    def _report(self) -> None:
        """Log, once, which modules ran in Python, and how many bytes were gathered for them."""
        modules, reasons = self.skipped_frames
        if self._reported or not modules:
            return
        self._reported = True
        if dist.get_rank() == 0:
            logger.warning(
                "These modules ran in Python: %s. Their parameters are gathered on access and released after"
                " use, %.1f MiB so far. Why: %s (TORCH_LOGS=graph_breaks says more).",
                ", ".join(sorted(modules)),
                sum(modules.values()) / 2**20,
                "; ".join(reasons[:3]) or "not known",
            )

    def _receive(self, id: int, grad: Tensor) -> None:
        self._accumulation.receive(self._accumulation.index_by_id(id), grad)

    def _running_passes(self, run: Callable[..., None]) -> Callable[..., None]:
        def run_passes(*args: Any, **kwargs: Any) -> None:
            if kwargs["bwd"]:
                graph, manager = kwargs["gm"].graph, kwargs["param_manager"][kwargs["graph_id"]]
                users: Collection[Any] = ()
                if self._accumulation.partitions_parameters:
                    users = users_of(manager.get_bwd_mapping(graph)[0], graph)
                else:
                    drop_parameters_without_gradient(manager, graph)
                isolate_gradient_nodes(graph, manager._param_indices, users)
            with ExitStack() as stack:
                stack.enter_context(keeping_inputs(kwargs["gm"].graph, kwargs["create_inputs_fn"]()))
                if not self._native:
                    stack.enter_context(cpu_profiling())
                if not self._accumulation.partitions_parameters:
                    stack.enter_context(alone())  # nothing is gathered, and gradients are not reduced in the graph
                run(*args, **kwargs)

        return run_passes

    def _outside_hooks(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """A backend that compiles, and runs compiled graphs, without the saved-tensor hooks of skipped frames."""

        def compile_graph(graph: Any, inputs: Any) -> Any:
            hide_again()
            with self._without_hooks():
                # Upstream's eager backend returns a function that Dynamo would capture once more, without our passes.
                compiled = torch.compiler.disable(backend(graph, inputs))

            params = [(at, given) for at, given in enumerate(inputs) if isinstance(given, nn.Parameter)]

            def run_graph(*args: Any) -> Any:
                if any(args[at] is not param for at, param in params):
                    # A frame that takes parameters as arguments was called with others. The compiled graph would reduce
                    # the gradients of those that it was compiled with. In Python, autograd accumulates the right ones.
                    return graph(*args)
                # A graph without parameters of its own may save gathered ones, which it gets as arguments.
                with self._without_hooks() if params else nullcontext():
                    return compiled(*args)

            return run_graph

        return compile_graph

    def _without_hooks(self) -> Any:
        return nullcontext() if self.eager is None else self.eager.without_hooks()


def _frame_of_its_own(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function``, with a code object of its own, to be compiled instead.

    Dynamo compiles no frame of torch.nn itself, such as the forward of an nn.Sequential, unless it is inlined. It keeps
    at most 8 compiled graphs per code object, which modules of one class share: from the ninth on they would run in
    Python. It remembers shapes by the name of the code.
    """

    def frame(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    frame.__code__ = frame.__code__.replace(co_name=f"forward of {name or 'the module'}")
    return frame


def _log(message: str, enable: bool = True) -> None:
    logger.debug(message)
