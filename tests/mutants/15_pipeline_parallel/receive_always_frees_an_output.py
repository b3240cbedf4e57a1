"""Frees an output whenever a gradient arrives, even if none is in flight.

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
        if kind == "B":
            self.in_flight["F"].popleft()[0].wait()
        return received
