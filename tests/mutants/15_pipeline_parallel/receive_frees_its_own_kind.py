"""Frees the oldest message of the kind that arrives, instead of an output when a gradient arrives.

caught by: Neighbors · freed
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def receive(self, kind, like):
        if self.stages == 1:
            return super().receive(kind, like)
        received = right.torch.empty(like.shape, dtype=like.dtype, device=like.device)
        group, peer = self.route(kind, sends=False)
        right.dist.recv(received, group=group, group_src=peer, tag=right.TAGS[kind])
        if self.in_flight[kind]:
            self.in_flight[kind].popleft()[0].wait()
        return received
