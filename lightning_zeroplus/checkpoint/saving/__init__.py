"""What a save leaves out (``frozen.py``); saves that go on while the training does (``background.py``)."""
