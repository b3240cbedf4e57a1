"""The modules that lessons import: ranks in notebook cells, and the instruments that measure them.

Importing this package does nothing. Start with `from shared import ranks`.
"""
