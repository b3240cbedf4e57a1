"""Does not broadcast the parameters, so the ranks start from different ones.

caught by: ZeRO1 · same start
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        flat_parameters = [right.FlatParameter(alike, self.group) for alike in right.group_by_kind(parameters)]
        self.gradients += [right.FlatGradients(flat_parameter) for flat_parameter in flat_parameters]
        return flat_parameters
