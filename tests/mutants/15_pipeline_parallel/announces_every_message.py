"""Announces the shape before each message.

caught by: Pipeline · wire
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def send_output(self, action, output):
        self.announcements.announced.clear()
        super().send_output(action, output)

    def input_of(self, action):
        self.announcements.expected.clear()
        return super().input_of(action)
