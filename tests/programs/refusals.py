"""What is refused, and how."""

from __future__ import annotations

from tests.programs.program import Refusal

#: A partition has one dtype, which is real.
COMPLEX = Refusal("ValueError|MisconfigurationException", "complex.*(view_as_real|real)")
#: Trainable parameters of another dtype than the partitions have.
FLOAT64 = Refusal("ValueError|MisconfigurationException", "float64.*Use stage 0")
#: Nothing is trainable, and there is nothing to partition.
NOTHING_TO_TRAIN = Refusal("MisconfigurationException", "zeroplus_stage0")
#: Sparse gradients.
SPARSE = Refusal("MisconfigurationException", "Use `sparse=False`")
