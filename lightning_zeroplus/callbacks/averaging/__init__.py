"""What ``EMA`` averages: this rank's shards of the weights, under every strategy. Start at ``shards.py``."""
