"""All-gathers into a new flat tensor and copies it: a second copy of all parameters in every step.

caught by: ZeRO1 · memory
"""

from unittest import mock

from shared.c10d import all_gather_single
from solutions import zero1 as right


class _Copying(right.FlatParameter):
    def launch_all_gather(self):
        gathered = self.layout.new_flat()
        work = all_gather_single(gathered, self.shard.detach(), group=self.layout.group, async_op=True)
        work.wait()
        self.flat_param.copy_(gathered)
        return work


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        with mock.patch.object(right, "FlatParameter", _Copying):
            return super()._flatten(parameters)
