"""Runs the last chunk once for its output and once more for the loss, so that its forwards take twice as long.

caught by: Pipeline · one forward
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def run(self, action, inputs, targets):
        chunk, index, position = self.chunks[action.chunk], action.micro_batch, self.position_of(action)
        if action.kind == "B":
            super().run(action, inputs, targets)
            return
        x = inputs[index] if position == 0 else self.input_of(action)
        output = chunk.run_forward(index, x)
        if position == self.last:
            self.losses.append(chunk.run_forward(index, x, self.loss_of(targets[index])))
        else:
            self.send_output(action, output)
