"""Testing code that uses streams, without a GPU: see :class:`StreamSanitizer`."""

from lightning_zeroplus.testing.streams.clocks import Event, Kernel, Stream
from lightning_zeroplus.testing.streams.report import Race, Site, StreamRaceError
from lightning_zeroplus.testing.streams.sanitizer import StreamSanitizer
from lightning_zeroplus.testing.streams.shadow import Span

__all__ = ["Event", "Kernel", "Race", "Site", "Span", "Stream", "StreamRaceError", "StreamSanitizer"]
