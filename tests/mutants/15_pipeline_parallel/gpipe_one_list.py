"""Returns the actions of one stage only.

caught by: gpipe · order
"""

from solutions import pipeline_schedules as right


def gpipe(stages, micro_batches):
    return right.gpipe(1, micro_batches)
