"""Waits inside launch_all_gather() and returns a handle that has nothing left to wait for.

caught by: FlatParameter · at once
"""

from solutions import zero1 as right


class _Complete:
    def wait(self):
        pass


class FlatParameter(right.FlatParameter):
    def launch_all_gather(self):
        super().launch_all_gather().wait()
        return _Complete()
