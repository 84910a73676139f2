"""``python -m lightning_zeroplus``: see :mod:`lightning_zeroplus.cli`."""

from lightning_zeroplus.cli import console

if __name__ == "__main__":
    console()
