"""Sends outputs and gradients with the same tag.

caught by: Neighbors · plain messages
"""

import torch.distributed as dist

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def send(self, kind, tensor):
        if self.stages == 1:
            return super().send(kind, tensor)
        message = tensor.contiguous()
        group, peer = self.route(kind)
        work = dist.isend(message, group=group, group_dst=peer)
        self.in_flight[kind].append((work, message))

    def receive(self, kind, like):
        if self.stages == 1:
            return super().receive(kind, like)
        received = right.torch.empty_like(like, memory_format=right.torch.contiguous_format)
        group, peer = self.route(kind, sends=False)
        dist.recv(received, group=group, group_src=peer)
        if kind == "B" and self.in_flight["F"]:
            self.in_flight["F"].popleft()[0].wait()
        return received
