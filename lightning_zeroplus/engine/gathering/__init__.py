"""Stage 3: the weights of a module are gathered when it runs, when somebody reads them, and on ranks that do neither.

Start with ``gathers``; ``in_step`` is for ranks that run different modules.
"""
