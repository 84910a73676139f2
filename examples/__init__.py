"""The examples, importable from a YAML config as ``examples.<name>`` with this folder's parent as working directory."""

import sys
from pathlib import Path

# They are scripts, and import each other by their plain names.
sys.path.append(str(Path(__file__).parent))
