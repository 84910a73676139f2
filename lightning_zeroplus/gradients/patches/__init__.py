"""Replacing methods and functions of torch and DeepSpeed, and restoring them."""
