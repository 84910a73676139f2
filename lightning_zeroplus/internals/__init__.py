"""What this package relies on outside itself.

``probe`` is how names in other packages are looked for, ``torch`` which of torch, and ``extensions`` the folder where
operators are built.
"""
