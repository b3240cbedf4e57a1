"""Waits inside launch_all_gather() and returns no handle.

caught by: FlatParameter · all-gather
"""

from solutions import zero1 as right


class FlatParameter(right.FlatParameter):
    def launch_all_gather(self):
        super().launch_all_gather().wait()
