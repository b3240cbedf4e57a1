"""The course's helper modules: ranks in notebook cells, and the instruments that watch them.

Nothing happens at import. Start with `from shared import ranks`.
"""
