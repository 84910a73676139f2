"""What ``fabric.save`` has written: start with ``opened``; ``sources`` has its models and optimizers."""
