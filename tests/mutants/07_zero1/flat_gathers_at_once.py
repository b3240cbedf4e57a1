"""Waits inside gather(), and gives back a handle that has nothing to wait for.

caught by: FlatParameters · begins
"""

from solutions import zero1 as right


class _Done:
    def wait(self):
        pass


class FlatParameters(right.FlatParameters):
    def gather(self):
        super().gather().wait()
        return _Done()


class ZeRO1(right.ZeRO1):
    pass
