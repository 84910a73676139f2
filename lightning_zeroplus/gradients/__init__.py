"""What the DeepSpeed engine and FSDP2 share; nothing here imports either of them.

``shown`` is ``param.grad`` as the user sees it. ``ranks`` finds out whether all ranks do the same, and helps where they
do not. ``patches`` replaces methods and functions of other packages.
"""

from lightning_zeroplus.internals.torch import GRADIENTS, check_imports

check_imports(GRADIENTS)
