"""The patched DeepSpeed engine. Nothing here imports Lightning.

Start with ``build`` and ``engine``, then ``accumulation``: the life of a gradient between two steps.

- ``families``: how each of upstream's optimizers accumulates and steps
- ``reduction``: from a backward to the averaged gradient; ``windows`` is its public side
- ``keeper``: ``param.grad`` as the user sees it; ``clipping``: what clips it, before the step or in it
- ``gathering``: the weights of stage 3
- ``optimizer``: the user's torch optimizers, also several, and exchanged ones
- ``host``: the part of the engine that all of these see
- ``state``: what a checkpoint saves of the engine
- ``compile``: DeepCompile; ``compiles`` starts and ends it, ``compiled_parts`` is ``torch.compile`` within the module
- ``upstream``: what the engine needs of DeepSpeed, and workarounds for what DeepSpeed lacks
"""
