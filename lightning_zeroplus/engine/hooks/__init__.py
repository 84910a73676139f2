"""The hooks of parameters, by which gradients come.

``received`` has ours, and takes gradients that autograd does not accumulate. ``users`` is about those of users.
"""
