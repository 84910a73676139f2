"""Where a gradient is between its backward and the optimizer, and how it gets there.

``received`` → ``local_sums`` (it waits on this rank) → ``flush`` and ``overlapped`` (it is reduced). ``held`` and
``deferred`` are windows. ``branches`` agrees where ranks differ. ``streams`` orders the work of a GPU, ``buckets`` are
physical buffers, and ``wire_dtypes`` are what a gradient is reduced in.
"""
