"""Frees the newest output when a gradient arrives, which may not have been received yet, and keeps the oldest.

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
        if kind == "B" and self.in_flight["F"]:
            self.in_flight["F"].pop()[0].wait()
        return received
