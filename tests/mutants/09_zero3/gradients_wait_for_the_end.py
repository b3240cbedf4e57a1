"""All whole gradients are here before the first one travels.

caught by: ReducesGradients · memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.at_the_end = []
        add = self.queue.add
        self.queue.add = lambda number, place: (
            self.at_the_end.append(number),
            self.queue.missing[number].remove(place),
        )
        self.really_add = add

    def finish_gradient_sync(self):
        for number, each in enumerate(self.travelling):
            self.queue.missing[number] = set(range(len(each.parameters)))
        here, self.queue.add = self.queue.add, self.really_add
        super().finish_gradient_sync()
        self.queue.add = here
