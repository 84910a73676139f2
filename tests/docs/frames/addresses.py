"""The block trains ``module`` on ``loader``, which are small. An object store in its folder stands for S3."""

import os

import fsspec

from tests.checkpoint.model import Tied
from tests.checkpoint.model import loader as make_loader
from tests.support.objects import ObjectStore


class S3(ObjectStore):
    protocol = "s3"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"{os.getcwd()}/s3.store/{path[5:].rstrip('/')}" if path.startswith("s3://") else path.rstrip("/")


class Plain(Tied):
    def on_train_start(self) -> None:
        pass


fsspec.register_implementation("s3", S3, clobber=True)
module, loader = Plain(), make_loader()
# BLOCK
