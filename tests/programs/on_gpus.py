"""Programs that do not run on GPUs, real or simulated: what DDP cannot run there, or runs as another program."""

from __future__ import annotations

_OWN_TENSORS = "it has tensors of its own on the CPU"
_FROM_BEFORE = "weights go to the GPU when a fit begins: under DDP, too, a tensor from before does not follow them"
#: Why, by name.
LEFT_OUT = {
    **dict.fromkeys(
        (
            *("weights_written_by_numpy", "gradients_written_by_numpy", "stepped_by_numpy", "kept_array"),
            *("kept_array_from_init", "kept_array_over_two_fits", "kept_array_of_one_rank", "kept_array_and_files"),
            *("kept_array_of_gradients", "stepped_by_address"),
        ),
        "numpy has only the CPU's memory",
    ),
    "lazy_layers": "its first forward, in `configure_model`, is on the device of neither weights nor batches",
    "device_statistics": "the metrics are the device's",
    "fabric_average": _OWN_TENSORS,
    "foreach_copies_from_before": _OWN_TENSORS,
    "fabric_loads_everything": _OWN_TENSORS,
    "no_optimizer_of_a_late_model": _OWN_TENSORS,
    "grads_kept_of_an_embedding": "NCCL reduces no sparse gradients, under DDP neither",
    "sparse_embedding": "the same",
    "low_sparse_embedding": "the same",
    **dict.fromkeys(
        (
            *("memory_of_another_weight", "memory_of_rows_of_a_weight", "memory_of_a_trained_weight"),
            *("memory_of_a_frozen_weight", "columns_of_one_tensor", "buffer_of_a_weight"),
        ),
        "on the way to the GPU each weight gets memory of its own: another program",
    ),
    "kept_in_init": _FROM_BEFORE,
    "differentiable_view_kept_in_init": _FROM_BEFORE,
    "kept_over_two_fits": _FROM_BEFORE,
    "parts_kept_over_two_fits": _FROM_BEFORE,
    "kept_and_interrupted": _FROM_BEFORE,
    "pruning": "on a GPU Lightning gives the weights memory of their own, on the CPU that of others: another program",
}
