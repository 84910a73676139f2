"""The patched DeepSpeed engine. Nothing here imports Lightning.

Start with ``build`` and ``engine``, then ``accumulation``: the life of a gradient between two steps, which ``zero12``,
``zero3`` and ``replicated`` adapt to one family of upstream's optimizers each (``choose`` picks one). Around it:

- gradients: ``received``, ``coalesce``, ``held`` (what waits), ``flush``, ``reduction``, ``buckets``, ``streams`` (how
  it is reduced), ``branches``, ``in_step`` (where ranks differ), ``grad_dtypes``, ``norms``, ``clip``, ``keeper``
  (``param.grad`` as the user sees it), ``zeroes``, ``traffic``
- weights: ``masters``, ``gathers`` (stage 3), ``partitioned_weights``, ``dtypes``, ``buffers``
- the torch optimizer: ``groups``, ``split_steps``, ``whole_steps``, ``elementwise``, ``rebuild``, ``unfrozen``; several
  of them: ``chain``, ``several``
- DeepCompile: ``compiles``, and the folder ``compile``
- state for checkpoints: ``layout``, ``state``
- what upstream is, and is not: ``probe``, ``older``, ``sharded_init``, ``scalars``, ``jit_locks``
"""
