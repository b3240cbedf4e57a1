"""Takes the index of the stage that it receives from for a rank of the world.

caught by: Neighbors · group
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def receive(self, kind, like):
        if self.stages == 1:
            return super().receive(kind, like)
        received = right.torch.empty(like.shape, dtype=like.dtype, device=like.device)
        group, peer = self.route(kind, sends=False)
        right.dist.recv(received, src=peer, group=group, tag=right.TAGS[kind])
        if kind == "B" and self.in_flight["F"]:
            self.in_flight["F"].popleft()[0].wait()
        return received
