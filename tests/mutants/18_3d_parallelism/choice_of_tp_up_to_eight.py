"""Never tries more than eight tp ranks.

caught by: choose_layout · clusters
"""

from itertools import product

from shared.planner import meshes
from shared.planner.meshes import Layout
from solutions.layouts import can_split


def choose_layout(shape, cluster, sequences):
    divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
    fitting = []
    for pp, tp, zero_stage in product(divisors, (1, 2, 3, 4, 6, 8), (0, 1)):
        layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
        if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
            continue
        if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
            fitting.append(layout)

    def preference(layout):
        step_s = meshes.step_s(shape, cluster, layout, sequences)
        return step_s, layout.zero_stage

    return min(fitting, key=preference, default=None)
