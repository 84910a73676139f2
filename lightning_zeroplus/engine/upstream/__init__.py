"""What DeepSpeed is, and is not: ``probe`` lists what is relied on; the others are remedies for what it cannot do."""
