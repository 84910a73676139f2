"""Models of transformers in ``configure_model`` at stage 3: every weight and every buffer is stage 0's, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.training import trainer, zero_plus

transformers = pytest.importorskip("transformers")

_SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SMALL, "intermediate_size": 32, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "bert": (
        "BertConfig",
        {**_SMALL, "intermediate_size": 32, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    ),
    "t5": ("T5Config", {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
}


def _from_config(kind: str) -> nn.Module:
    name, settings = CONFIGS[kind]
    torch.manual_seed(3)
    return transformers.AutoModel.from_config(getattr(transformers, name)(**settings))


def _training(kind: str, folder: str | None, stage: int, precision: Any) -> tuple[Any, Any, int]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            self.net = _from_config(kind) if folder is None else transformers.AutoModel.from_pretrained(folder)
            torch.manual_seed(7)
            self.head = nn.Linear(16, 4)
            self.partitioned = sum(hasattr(param, "ds_id") for param in self.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            decoder = {"decoder_input_ids": batch[0]} if kind == "t5" else {}
            hidden = self.net.eval()(input_ids=batch[0], **decoder).last_hidden_state
            return self.head(hidden).float().pow(2).mean()

        def on_train_start(self) -> None:
            self.first = _tensors(self)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    ids = torch.arange(64).view(8, 8) % 32
    trainer(zero_plus(stage), max_epochs=1, precision=precision).fit(
        module, DataLoader(TensorDataset(ids), batch_size=2)
    )
    return module.first, _tensors(module), module.partitioned


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([param for param in module.parameters() if hasattr(param, "ds_id")]):
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name: value.detach().clone() for name, value in named}


def _compare(kind: str, folder: str | None, precision: str) -> tuple[list[str], float, float, int]:
    first, want, _ = _training(kind, folder, 0, precision)
    begun, got, partitioned = _training(kind, folder, 3, precision)
    assert first.keys() == begun.keys()
    differing = [n for n in first if first[n].dtype != begun[n].dtype or not torch.equal(first[n], begun[n])]
    error = max(float((want[name].double() - got[name].double()).abs().max()) for name in want)
    moved = max(float((want[name].double() - first[name].double()).abs().max()) for name in want)
    return differing, error, moved, partitioned


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("how", ["from_config", pytest.param("from_pretrained", marks=pytest.mark.slow)])
def test_weights_and_buffers_are_those_of_stage_0(ranks2: Any, tmp_path: Path, kind: str, how: str) -> None:
    """``rotary_emb.inv_freq`` was memory that nobody had written to, and a BERT could not be built."""
    folder = None
    if how == "from_pretrained":
        folder = str(tmp_path / kind)
        _from_config(kind).save_pretrained(folder)
    for differing, error, moved, partitioned in ranks2.run(_compare, kind, folder, "32-true"):
        assert not differing
        assert error <= 1e-6 < 1e-2 < moved
        assert partitioned, "the model must be sharded while it is built"


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_they_are_in_16_bits_too(ranks2: Any, tmp_path: Path, precision: str) -> None:
    folder = str(tmp_path / "llama")
    _from_config("llama").save_pretrained(folder)
    for differing, error, moved, _ in ranks2.run(_compare, "llama", folder, precision):
        assert not differing
        assert error <= 1e-3 < 1e-2 < moved
