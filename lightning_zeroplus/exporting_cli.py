"""The command ``export``: :func:`lightning_zeroplus.export` on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from lightning_zeroplus.checkpoint.export import export


def run(arguments: Sequence[str]) -> int:
    """Write one file.

    Args:
        arguments: The command line after ``export``.

    Returns:
        The exit status: 1 if nothing was written, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_zeroplus export",
        description="Write a checkpoint of any stage, of FSDP2, of Fabric, or of plain Lightning to one file.",
    )
    parser.add_argument("checkpoint", help="the folder or file")
    parser.add_argument("path", help="the file: .safetensors (weights and buffers) or .ckpt (a Lightning checkpoint)")
    parser.add_argument("--optimizer", action="store_true", help="also write what a fit needs to go on; for .ckpt")
    parser.add_argument("--dtype", help="convert floating-point weights to it, for example bfloat16")
    parser.add_argument("--model", help="which model, by its name in `fabric.save(path, state)`, if there are several")
    parser.add_argument(
        "--no-weights-only", action="store_true", help="unpickle whatever the checkpoint has: may execute its code"
    )
    options = parser.parse_args(arguments)
    dtype = None if options.dtype is None else getattr(torch, options.dtype, None)
    if options.dtype is not None and not isinstance(dtype, torch.dtype):
        parser.error(f"--dtype {options.dtype}: there is no such dtype")
    try:
        export(
            options.checkpoint,
            options.path,
            dtype,
            optimizer=options.optimizer,
            weights_only=not options.no_weights_only,
            model=options.model,
        )
    except (ValueError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
