"""Only calls the module: autograd keeps everything.

caught by: Checkpointed · memory
"""

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return self.module(*inputs)
