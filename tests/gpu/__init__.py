"""What only a real GPU can show. ``pytest -m gpu --thorough``; two ranks share it, if there is one alone."""
