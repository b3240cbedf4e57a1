"""Its optimizer saves a state, and loads none.

caught by: ZeRO2 · state
"""

from solutions import zero2 as right


class Anew(right.BucketOptimizer):
    def load_state_dict(self, state_dict):
        pass


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        before, right.BucketOptimizer = right.BucketOptimizer, Anew
        try:
            super().__init__(*args, **options)
        finally:
            right.BucketOptimizer = before
