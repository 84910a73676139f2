"""What the DeepSpeed engine and FSDP2 share: nothing here knows either of them.

``shown`` is ``param.grad`` as the user sees it. ``ranks``: do all ranks do the same, and what if not. ``patches``: how
methods and functions of others are replaced.
"""
