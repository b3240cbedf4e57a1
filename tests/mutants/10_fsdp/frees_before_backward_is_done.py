"""Reshards a unit once its gradients are packed, although backward still needs its frozen parameters.

caught by: ZeRO3 · awkward models
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for unit, buckets in self.buckets_of.items():
            for parameter in (each for bucket in buckets for each in bucket.parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: self.reshard_if_packed(unit))

    def reshard_if_packed(self, unit):
        if not any(self.reducer.missing[bucket] for bucket in self.buckets_of[unit]):
            unit.reshard()
