"""The names of averaged weights in checkpoints."""

from __future__ import annotations

#: Where one file has whole averages, by parameter.
AVERAGES = "zeroplus_ema"


def of_zero(parameter: str) -> str:
    """The name of a parameter's average in a folder that ``ZeroPlusStrategy`` has saved."""
    return f"optimizer/{parameter}/{AVERAGES}"


def of_fsdp(parameter: str) -> str:
    """The name of a parameter's average in a folder that ``ZeroPlusFSDPStrategy`` has saved."""
    return f"optimizer_0.{AVERAGES}.{parameter}"
