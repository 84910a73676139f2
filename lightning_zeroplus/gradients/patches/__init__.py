"""How methods and functions of torch and DeepSpeed are replaced, and given back."""
