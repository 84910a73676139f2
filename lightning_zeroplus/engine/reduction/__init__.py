"""Where a gradient is between its backward and the optimizer, and how it gets there.

``local_sums`` is where it waits on this rank, ``exchange`` and ``overlapped`` reduce it. ``held`` is about windows,
``branches`` about ranks that differ, ``received`` about gradients that autograd does not accumulate. ``streams`` orders
the work of a GPU, ``buckets`` are physical buffers, and ``wire_dtypes`` are what a gradient is reduced in.
"""
