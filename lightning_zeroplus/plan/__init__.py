"""Which strategy fits, and what it costs on the wire: an estimate from shapes, without a device and without a process.

Start at :func:`plan` (``choose.py``). ``model.py`` describes what is trained, ``optimizers.py`` runs a step on the meta
device, ``replicated.py``, ``partitioned.py`` and ``sharded.py`` have the rules of the strategies, and ``estimate.py``
what they return. The tests compare every number with a measured one.
"""

from lightning_zeroplus.plan.choose import Job, best, plan
from lightning_zeroplus.plan.estimate import Collective, Estimate, Link
from lightning_zeroplus.plan.model import Model, describe
from lightning_zeroplus.plan.settings import Settings, settings_of

__all__ = ["Collective", "Estimate", "Job", "Link", "Model", "Settings", "best", "describe", "plan", "settings_of"]
