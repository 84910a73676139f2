"""An engine's ``compile()``: DeepCompile on chosen modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_zeroplus.engine.upstream import probe

if TYPE_CHECKING:
    from lightning_zeroplus.engine.compile.session import CompileSession, Schedule


class CompilesRegions:
    """The part of an engine that runs DeepCompile.

    Attributes:
        compilation: The session that :meth:`compile` has started; None before.
    """

    compilation: CompileSession | None = None
    _deepcompile_active: bool = False
    module: Any

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Schedule | None = None,
        regions: Sequence[nn.Module] | None = None,
    ) -> None:
        """Compile with DeepCompile, at stages 1 to 3.

        Args:
            backend: ``"inductor"`` or ``"eager"``.
            compile_kwargs: More arguments of ``torch.compile``.
            schedule: Which passes to run, from which optimizer step on; None: upstream's.
            regions: The modules to compile, each by itself; None: the engine's module as a whole.

        Raises:
            ValueError: If the engine cannot be compiled; nothing has been changed.
            UnsupportedDeepSpeedError: If this DeepSpeed has no DeepCompile, or another one.
        """
        try:
            from lightning_zeroplus.engine.compile.session import CompileSession, check_can_compile
        except ImportError as error:
            raise probe.unsupported(f"DeepCompile as `compile` needs it ({error})")
        check_can_compile(self, backend, schedule)
        session = CompileSession(self, [self.module] if regions is None else regions)
        session.start(
            lambda: super(CompilesRegions, self).compile(  # type: ignore[misc]
                backend=backend, compile_kwargs=dict(compile_kwargs or {}), schedule=schedule
            )
        )
        self.compilation = session

    def close_compilation(self) -> None:
        """Undo :meth:`compile`: the modules run in Python again. The engine must not be used afterwards."""
        if self.compilation is not None:
            self.compilation.close()
            self.compilation = None

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduce as without DeepCompile; upstream would leave the reduction to the compiled graphs."""
        if not self._deepcompile_active:
            super().allreduce_gradients(*args, **kwargs)  # type: ignore[misc]
            return
        self._deepcompile_active = False
        try:
            super().allreduce_gradients(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._deepcompile_active = True
