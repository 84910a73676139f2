"""The block stands in a ``training_step``, in manual optimization, at stage 2."""

from tests.docs.small import Small, check_trained, fit


class Module(Small):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        # BLOCK
        optimizer.step()
        optimizer.zero_grad()


module = Module()
fit(module, "zeroplus_stage2")
check_trained(module)
