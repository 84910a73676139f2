"""Adapters of `peft` around small random models of `transformers`."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor

import lightning_zeroplus as zp
from tests.programs.families.hugging_face import _LLAMA, _Causal
from tests.programs.program import program
from tests.programs.run import Run, tokens

_PEFT = {"imports": (*_LLAMA["imports"], "peft")}


class _Adapted(_Causal):
    """LoRA in the attention, as `settings` say."""

    settings: dict[str, Any] = {}

    def build(self) -> Any:
        from peft import LoraConfig, get_peft_model

        settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], **self.settings}
        return get_peft_model(super().build(), LoraConfig(task_type="CAUSAL_LM", **settings))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], 0.01, eps=1e-2)


class _Late(_Adapted):
    def build(self) -> Any:
        return None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = self.adapted()

    def adapted(self) -> Any:
        return _Adapted.build(self)


class _Saves(_Adapted):
    """Rank zero alone saves the adapters in the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def save(self, name: str, **how: Any) -> None:
        if self.trainer.is_global_zero:
            self.net.save_pretrained(self.folder / name, **how)

    def on_train_end(self) -> None:
        self.save("end")


class _SavesLate(_Late, _Saves):
    pass


def _fits(run: Run, module: Any, **kwargs: Any) -> Any:
    return run.fit(module, run.loader(3, make=tokens), **kwargs)


def _compare(run: Run, *folders: str, file: str = "adapter_model.safetensors") -> None:
    """Compare what was saved."""
    torch.distributed.barrier()
    for index, folder in enumerate(folders):
        entries = load_file(run.folder / folder / file)
        run.keep(**{f"number_{index}": len(entries)})
        run.keep(**{f"{index} {name.replace('.', ' ')}": tensor for name, tensor in entries.items()})


@program(**_PEFT)
def adapters_saved(run: Run) -> None:
    """`save_pretrained` on rank zero, after validations and in `on_train_end`; then after the fit, as a pickle."""

    class Module(_Saves):
        def on_validation_end(self) -> None:
            self.save(f"epoch {self.current_epoch}")

    module = Module(run.folder)
    _fits(run, module, max_epochs=2, val=run.loader(1, make=tokens))
    module.save("after", safe_serialization=False)
    _compare(run, "epoch 0", "epoch 1", "end")
    pickled = torch.load(run.folder / "after" / "adapter_model.bin", weights_only=True)
    run.keep(**{f"pickled {name.replace('.', ' ')}": tensor for name, tensor in pickled.items()})


@program(**_PEFT, on_three_ranks=True)
def adapters_saved_by_all(run: Run) -> None:
    """`save_pretrained(is_main_process=...)` on all ranks, after each batch, once within `zp.gathered`."""

    class Module(_Saves):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with zp.gathered(self.net) if batch_idx == 1 else nullcontext():
                self.net.save_pretrained(self.folder / str(batch_idx), is_main_process=self.trainer.is_global_zero)

    _fits(run, Module(run.folder))
    _compare(run, "0", "1", "2", "end")


@program(**_PEFT)
def adapters_read(run: Run) -> None:
    """`get_peft_model_state_dict` after each batch; the adapters go back to the first ones before the last."""

    class Module(_Adapted):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            from peft import get_peft_model_state_dict, set_peft_model_state_dict

            state = get_peft_model_state_dict(self.net)
            for name, value in state.items():
                self.log(name.replace(".", "_"), value.square().sum())
            if batch_idx == 0:
                self.first = {name: value.clone() for name, value in state.items()}
            if batch_idx == 1:
                set_peft_model_state_dict(self.net, self.first)

    _fits(run, Module())


@program(**_PEFT)
def adapters_of_many_kinds(run: Run) -> None:
    """DoRA, a module that is trained whole, and new rows of the embedding, saved on rank zero."""

    class Module(_Saves):
        settings = {"modules_to_save": ["lm_head"], "use_dora": True, "trainable_token_indices": [1, 2, 3]}

    _fits(run, Module(run.folder))
    _compare(run, "end")


@program(**_PEFT)
def adapters_disabled(run: Run) -> None:
    """The model without its adapters is the reference, as in DPO."""

    class Module(_Adapted):
        def loss(self, batch: Any) -> Tensor:
            with torch.no_grad(), self.net.disable_adapter():
                reference = self.net(input_ids=batch[0]).logits
            return (self.net(input_ids=batch[0]).logits - reference - 1).square().mean()

    _fits(run, Module())


@program(**_PEFT)
def adapters_merged(run: Run) -> None:
    """The adapters are merged in validation and unmerged after it; a merged copy is saved in the end."""

    class Module(_Saves):
        def on_validation_start(self) -> None:
            self.net.merge_adapter()

        def on_validation_end(self) -> None:
            self.net.unmerge_adapter()

        def on_train_end(self) -> None:
            merged = copy.deepcopy(self.net).merge_and_unload()
            if self.trainer.is_global_zero:
                merged.save_pretrained(self.folder / "merged")

    _fits(run, Module(run.folder), max_epochs=2, val=run.loader(1, make=tokens))
    _compare(run, "merged", file="model.safetensors")


@program(**_PEFT)
def adapters_late(run: Run) -> None:
    """`get_peft_model` in `configure_model`, and then `PeftModel.from_pretrained` of what was saved."""
    _fits(run, _SavesLate(run.folder))
    _compare(run, "end")

    class Continues(_SavesLate):
        def adapted(self) -> Any:
            from peft import PeftModel

            return PeftModel.from_pretrained(_Causal.build(self), self.folder / "start", is_trainable=True)

    if run.rank == 0:
        shutil.copytree(run.folder / "end", run.folder / "start")
    torch.distributed.barrier()
    _fits(run, Continues(run.folder))
    _compare(run, "end")


@program(**_PEFT)
def adapters_without_frozen(run: Run) -> None:
    """`save_frozen=False`: a checkpoint with the adapters alone, beside which the adapters are saved, is resumed."""
    last = ModelCheckpoint(run.folder / "checkpoints", every_n_train_steps=3)

    class Module(_Saves):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            self.save("beside")

    keep = {"callbacks": [last], "enable_checkpointing": True, "strategy": run.make_strategy(save_frozen=False)}
    _fits(run, Module(run.folder), **keep)
    _fits(run, Module(run.folder), max_epochs=2, ckpt_path=last.best_model_path, strategy=run.make_strategy())
    _compare(run, "beside", "end")
