"""Losses over all embeddings of a batch: cached ones for manual optimization, and InfoNCE by tiles.

Start with ``cached.py``. ``columns.py`` cuts its inputs into chunks, ``replay.py`` draws their random numbers again,
``reducing.py`` reduces once, and ``ranks.py`` has what the ranks tell each other.
"""

from lightning_zeroplus.losses.contrastive import info_nce
from lightning_zeroplus.losses.ranks import gather_rows

__all__ = ["gather_rows", "info_nce"]
