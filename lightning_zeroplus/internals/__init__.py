"""What this package relies on inside other packages: ``probe`` is how it is looked for, ``torch`` what of torch."""
