"""The types of a DeepSpeed config's settings. Wrong ones are refused by name, before DeepSpeed is imported.

DeepSpeed reads most settings when an engine is built, long after the process group, and never checks some of them:
``"gradient_clipping": "1.0"`` fails in the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning.pytorch.utilities.exceptions import MisconfigurationException


class _Type(NamedTuple):
    accepts: Callable[[Any], bool]
    description: str


_DTYPES = "fp32 float32 float fp16 float16 half bf16 bfloat16".split()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SECTION = _Type(lambda value: isinstance(value, Mapping), "a section, such as {}")
_BOOL = _Type(lambda value: isinstance(value, bool), "true or false")
_COUNT = _Type(lambda value: _is_integer(value) and value > 0, "a positive integer")
_LIMIT = _Type(lambda value: _is_number(value) and value >= 0, "a number of at least 0")
_FACTOR = _Type(lambda value: _is_number(value) and value > 0, "a positive number")
_DTYPE = _Type(lambda value: value is None or value.lower() in ("fp32", "fp16", "bf16"), '"fp32", "fp16" or "bf16"')
_ACCUMULATION = _Type(
    lambda value: value is None or value.removeprefix("torch.") in _DTYPES, '"fp32", "fp16" or "bf16"'
)
_NAME = _Type(lambda value: isinstance(value, str) and value != "", "a name")

_TYPES: dict[str, _Type] = {
    **dict.fromkeys(
        """activation_checkpointing aio bf16 bfloat16 checkpoint comms_logger csv_monitor data_types flops_profiler
        fp16 monitor_config nebula optimizer scheduler tensorboard timers torch_autocast wandb comet
        zero_optimization""".split(),
        _SECTION,
    ),
    **dict.fromkeys(
        """disable_allgather dump_state load_universal_checkpoint memory_breakdown prescale_gradients
        use_data_before_expert_parallelism use_node_local_storage wall_clock_breakdown zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer""".split(),
        _BOOL,
    ),
    "train_micro_batch_size_per_gpu": _COUNT,
    "steps_per_print": _Type(lambda value: _COUNT.accepts(value) or value == math.inf, "a positive integer"),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), _DTYPE),
    "gradient_clipping": _LIMIT,
    "gradient_predivide_factor": _FACTOR,
}
#: The same for settings within a section. DeepSpeed itself checks the rest of ``zero_optimization``.
_IN_SECTION: dict[tuple[str, str], _Type] = {
    ("zero_optimization", "offload_optimizer"): _Type(lambda v: v is None or isinstance(v, Mapping), "a section"),
    ("zero_optimization", "offload_param"): _Type(lambda v: v is None or isinstance(v, Mapping), "a section"),
    ("optimizer", "type"): _NAME,
    ("optimizer", "params"): _SECTION,
    ("scheduler", "params"): _SECTION,
    ("data_types", "grad_accum_dtype"): _ACCUMULATION,
    **{(section, "enabled"): _BOOL for section in ("fp16", "bf16")},
}


def check_types(config: Mapping[str, Any]) -> None:
    """Refuse settings of a wrong type or out of range.

    Raises:
        MisconfigurationException: If there is one, naming the key, the value and what it must be.
    """
    for key, value in config.items():
        if key in _TYPES:
            _check(f"config[{key!r}]", value, _TYPES[key])
    for (section, key), wanted in _IN_SECTION.items():
        if key in config.get(section, {}):
            _check(f"config[{section!r}][{key!r}]", config[section][key], wanted)


def _check(name: str, value: Any, wanted: _Type) -> None:
    try:
        accepted = wanted.accepts(value)
    except AttributeError:  # not a string
        accepted = False
    if not accepted:
        raise MisconfigurationException(f"`{name}` must be {wanted.description}, not {value!r}.")
