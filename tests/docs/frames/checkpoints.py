"""The block trains ``module`` on ``loader``, which are small, and saves and loads in a folder of its own."""

from tests.checkpoint.model import Tied
from tests.checkpoint.model import loader as make_loader


class Plain(Tied):
    def on_train_start(self) -> None:
        pass


module, loader = Plain(), make_loader()
# BLOCK
