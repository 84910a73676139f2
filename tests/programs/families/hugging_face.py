"""Small random models of `transformers`; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, step
from tests.programs.program import program
from tests.programs.run import Run, tokens

_LLAMA = {"imports": ("transformers.models.llama.modeling_llama",)}
_GPT2 = {"imports": ("transformers.models.gpt2.modeling_gpt2",)}
_BERT = {"imports": ("transformers.models.bert.modeling_bert",)}
_SIZES = {"vocab_size": 16, "attn_implementation": "eager"}


def llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **_SIZES
    )


def gpt2_config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_SIZES,
    )  # fmt: skip


def bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, max_position_embeddings=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_SIZES,
    )  # fmt: skip


def auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM


def make(config: Any) -> Any:
    return auto_class(config).from_config(config)


class _Causal(Regression):
    """Next-token prediction."""

    config = staticmethod(llama_config)

    def build(self) -> Any:
        return make(self.config())

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1, eps=1e-2)


class _Late(_Causal):
    """The model is made in `configure_model`."""

    def build(self) -> Any:
        return None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = make(self.config())


def _fits(name: str, what: str, base: type[_Causal], config: Any, **details: Any) -> None:
    made = type(name, (base,), {"__doc__": what, "__module__": __name__, "config": staticmethod(config)})

    def run_it(run: Run) -> None:
        run.fit(made(), run.loader(3, make=tokens))

    run_it.__name__, run_it.__doc__ = name, what
    program(**details)(run_it)


_fits("llama", "Llama, made in `__init__`.", _Causal, llama_config, **_LLAMA)
_fits("gpt2", "GPT-2, whose embedding is its output's weight.", _Causal, gpt2_config, **_GPT2, on_three_ranks=True)
_fits("bert", "BERT.", _Causal, bert_config, **_BERT, stays=("net.bert.embeddings.token_type_embeddings.weight",))
_fits("llama_late", "Llama by `from_config` in `configure_model`.", _Late, llama_config, **_LLAMA, on_three_ranks=True)
_fits("gpt2_late", "GPT-2 by `from_config` in `configure_model`.", _Late, gpt2_config, **_GPT2)
_fits("bert_late", "BERT by `from_config` in `configure_model`.", _Late, bert_config, **_BERT)


def _pretrained(run: Run, config: Any) -> None:
    torch.manual_seed(3)
    folder = run.folder / "pretrained"
    if run.rank == 0:
        make(config).save_pretrained(folder)
    if not run.alone:
        torch.distributed.barrier()

    class Pretrained(_Late):
        def configure_model(self) -> None:
            if self.net is None:
                self.net = auto_class(config).from_pretrained(folder, attn_implementation="eager")

    run.fit(Pretrained(), run.loader(3, make=tokens))


@program(**_LLAMA)
def llama_pretrained(run: Run) -> None:
    """Llama by `from_pretrained`, of a local folder, in `configure_model`."""
    _pretrained(run, llama_config())


@program(**_GPT2)
def gpt2_pretrained(run: Run) -> None:
    """GPT-2 by `from_pretrained`, of a local folder, in `configure_model`."""
    _pretrained(run, gpt2_config())


@program(**_BERT, stays=("net.bert.embeddings.token_type_embeddings.weight",))
def bert_pretrained(run: Run) -> None:
    """BERT by `from_pretrained`, of a local folder, in `configure_model`."""
    _pretrained(run, bert_config())


@program(**_LLAMA)
def llama_recomputed(run: Run) -> None:
    """Llama with gradient checkpointing, accumulation and clipping."""

    class Recomputes(_Causal):
        def build(self) -> Any:
            net = super().build()
            net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return net

    run.fit(Recomputes(), run.loader(4, make=tokens), accumulate_grad_batches=2, gradient_clip_val=0.1)


@program(**_GPT2)
def gpt2_in_chunks(run: Run) -> None:
    """GPT-2 in a manual loop: a backward per chunk, the schedule of `transformers`, clipping by hand."""
    from transformers import get_cosine_schedule_with_warmup

    class Chunks(_Causal, Manual):
        config = staticmethod(gpt2_config)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for chunk in batch[0].chunk(2):
                self.manual_backward(self.loss((chunk,)) / 2)
            self.clip_gradients(optimizer, 0.1, "norm")
            step(optimizer)
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [get_cosine_schedule_with_warmup(optimizer, 1, 6)]

    run.fit(Chunks(), run.loader(4, make=tokens))


class _LoRA(nn.Module):
    """A frozen linear layer and an adapter of rank 2."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class _Adapted(_Causal):
    def build(self) -> Any:
        net = super().build().requires_grad_(False)
        for block in net.model.layers:
            block.self_attn.q_proj = _LoRA(block.self_attn.q_proj)
            block.self_attn.v_proj = _LoRA(block.self_attn.v_proj)
        return net

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], 0.01, eps=1e-2)


@program(**_LLAMA)
def lora(run: Run) -> None:
    """LoRA on Llama's attention."""
    run.fit(_Adapted(), run.loader(3, make=tokens))


@program(**_LLAMA)
def lora_adapters_read(run: Run) -> None:
    """LoRA; the adapters are read at the end of the fit, within `zp.gathered`."""

    class Reads(_Adapted):
        def on_train_end(self) -> None:
            with zp.gathered(self.net):
                for index, (_, param) in enumerate((n, p) for n, p in self.net.named_parameters() if ".up." in n):
                    run.keep(**{f"adapter_{index}": param})

    run.fit(Reads(), run.loader(3, make=tokens))


@program(**_LLAMA)
def llama_dpo(run: Run) -> None:
    """DPO: the reference model is a frozen copy, made in `__init__`."""

    class DPO(_Causal):
        def build(self) -> Any:
            net = super().build()
            reference = super().build().requires_grad_(False)
            reference.load_state_dict(net.state_dict())
            return nn.ModuleDict({"policy": net, "reference": reference})

        def score(self, name: str, ids: Tensor) -> Tensor:
            logits = self.net[name](input_ids=ids).logits[:, :-1]  # type: ignore[index]
            return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))

        def loss(self, batch: Any) -> Tensor:
            chosen, rejected = batch[0].chunk(2)
            with torch.no_grad():
                base = self.score("reference", chosen) - self.score("reference", rejected)
            margin = self.score("policy", chosen) - self.score("policy", rejected) - base
            return -F.logsigmoid(0.5 * margin).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net["policy"].parameters(), 0.01, eps=1e-2)  # type: ignore[index]

    run.fit(DPO(), run.loader(3, make=tokens))
