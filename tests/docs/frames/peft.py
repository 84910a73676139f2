"""The block is a LightningModule with an adapter of peft, which is trained at stage 3 and under FSDP2."""

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from tests.programs.families.hugging_face import llama_config, make
from tests.programs.run import tokens
from tests.support.training import trainer


def make_model():
    torch.manual_seed(0)
    return make(llama_config())


# BLOCK

for strategy in (zp.ZeroPlusStrategy(stage=3, save_frozen=False), zp.ZeroPlusFSDPStrategy(save_frozen=False)):
    module = Adapted()  # noqa: F821  # the block's
    batches = [tokens(torch.Generator().manual_seed(seed), 2) for seed in range(2)]
    trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(module, DataLoader(batches, batch_size=None))
    torch.distributed.barrier()
    file = load_file("adapter/adapter_model.safetensors")
    trained = dict(module.net.named_parameters())
    assert len(file) == 8
    for name, value in file.items():
        assert value.numel() and torch.equal(value, trained[name.replace(".weight", ".default.weight")]), name
    assert any(value.any() for name, value in file.items() if "lora_B" in name)
    torch.distributed.barrier()
