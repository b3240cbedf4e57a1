"""Receives a gradient with the shape of the chunk's input, which may be wider than its output.

caught by: Pipeline · schedules
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def run(self, action, inputs, targets):
        position = self.position_of(action)
        if action.kind == "F" or position == self.last:
            return super().run(action, inputs, targets)
        chunk, index = self.chunks[action.chunk], action.micro_batch
        gradient = chunk.run_backward(index, self.neighbors.receive("B", chunk.kept[index][0]))
        if position:
            self.neighbors.send("B", gradient)
