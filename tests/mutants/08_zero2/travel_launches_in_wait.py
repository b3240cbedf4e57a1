"""launch() only makes a note; wait() sends.

caught by: TravellingGradients · wire
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def launch(self):
        if self.before is not None:
            self.before.wait()
        self.finish = lambda: right.begin_reduce_scatter(self.flat, self.home.group)()
