"""What all strategies share: ``window`` is the policy of windows, ``launcher`` and ``process`` start and end ranks."""
