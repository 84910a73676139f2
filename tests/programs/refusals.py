"""What is refused, and how."""

from __future__ import annotations

from tests.programs.program import Refusal

#: A weight at stage 3 is on one rank in part only; who reads or writes it says so.
PARTITIONED = Refusal("PartitionedWeightError", r"zp\.gathered|lightning_zeroplus\.gathered|gathered\(")
#: torch's own: under FSDP2 parameters and gradients are `DTensor`s, which do not mix with other tensors.
MIXED = Refusal("RuntimeError", "convert all torch.Tensor to DTensor")
#: Optimizers that look at a tensor as a whole.
WHOLE_TENSORS = Refusal("ValueError|MisconfigurationException", "whole")
#: A partition has one dtype, which is real.
COMPLEX = Refusal("ValueError|MisconfigurationException", "complex.*(view_as_real|real)")
#: Trainable parameters of another dtype than the partitions have.
FLOAT64 = Refusal("ValueError|MisconfigurationException", "float64.*Use stage 0")
#: Ranks that take different branches under FSDP2, whose collectives do not match.
#: `configure_optimizers` returns None, and there is nothing to partition.
NO_OPTIMIZER = Refusal("MisconfigurationException", "zeroplus_stage0")
#: Sparse gradients.
SPARSE = Refusal("MisconfigurationException", "Use `sparse=False`")
