"""As ``fit``. Replaced, too: Lightning's strategy, by itself less its refusal of the CPU. The audit has to raise."""

import os

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.audit.report import GradientMismatchError
from tests.docs.small import OnCPUs, Small
from tests.support.upstream import CPUDeepSpeedStrategy

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def Trainer(strategy, callbacks):
    assert strategy == "deepspeed_stage_2" and isinstance(callbacks[0], zp.GradientAudit)
    stage_2 = CPUDeepSpeedStrategy(stage=2, process_group_backend="gloo", overlap_comm=False)
    return OnCPUs(strategy=stage_2, callbacks=callbacks)


module = Small()
error = None
try:
    # BLOCK
    pass
except GradientMismatchError as raised:
    error = str(raised)
assert error is not None and "4 of 4 parameters differ" in error, error
