"""The way of a gradient from its backward to the optimizer.

A gradient waits on its rank in ``local_sums``; ``exchange`` and ``overlapped`` reduce it. ``held`` is about windows,
``branches`` about ranks that differ. ``streams`` orders the work of a GPU, ``buckets`` makes a bucket per dtype, and
``wire_dtypes`` chooses the dtype of each reduction.
"""
