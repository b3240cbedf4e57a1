"""launch() waits for what it has just launched.

caught by: TravellingGradients · at once
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def launch(self):
        super().launch()
        part = self.finish()
        self.finish = lambda: part
