"""The patched DeepSpeed engine. Nothing here imports Lightning.

Start with ``build`` and ``engine``, then ``accumulation``: the life of a gradient between two steps.

- ``families``: how upstream's optimizers, each in its way, accumulate and step
- ``reduction``: from a backward to the averaged gradient; ``windows`` is its public side
- ``keeper``: ``param.grad`` as the user sees it
- ``gathering``: the weights of stage 3
- ``optimizer``: the user's torch optimizers
- ``host``: what all of these see of the engine
- ``state``: what a checkpoint has of it
- ``compile``: DeepCompile; ``compiles`` begins and ends it, ``compiled_parts`` is ``torch.compile`` within the module
- ``upstream``: what DeepSpeed is, and is not
"""
