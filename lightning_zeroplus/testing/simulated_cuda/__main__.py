"""``python -m lightning_zeroplus.testing.simulated_cuda [--ranks N] script.py ...``: a script on simulated devices.

It starts the script once for each rank, with torchrun's variables. So ``Trainer(accelerator="cuda", devices=N)`` and
``torch.distributed.init_process_group("nccl")`` find their ranks, and each rank finds N devices.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch.distributed as dist

from lightning_zeroplus.internals.extensions import choose_extensions_folder
from lightning_zeroplus.testing.simulated_cuda import library
from lightning_zeroplus.testing.simulated_cuda.process import BOOT, environment


def main(arguments: list[str]) -> int:
    """Run the script and return the first exit code of a rank that is not 0, else 0."""
    options = parse(arguments)
    choose_extensions_folder()
    try:
        library.build()
    except library.SimulatedCudaError as error:
        print(error, file=sys.stderr)
        return 1
    if options.build:
        return 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(BOOT), "run", str(options.ranks), options.script, *options.arguments]
    ranks = [
        subprocess.Popen(command, env=environment() | _variables(rank, options.ranks, store.port))
        for rank in range(options.ranks)
    ]
    return _wait(ranks)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m lightning_zeroplus.testing.simulated_cuda", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks, and devices of each (default: 2)")
    parser.add_argument("--build", action="store_true", help="build the device, which takes half a minute, and exit")
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if not options.script and not options.build:
        parser.error("give a script to run, or --build")
    if options.ranks < 1:
        parser.error(f"--ranks must be at least 1, not {options.ranks}")
    return options


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "simulated-cuda",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 starts no store: this process has it
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; kill the others when one fails, which would wait for it."""
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
