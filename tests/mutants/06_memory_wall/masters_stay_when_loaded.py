"""Keeps the current masters when a checkpoint is loaded, so loading does not restore the parameters.

caught by: MasterWeights · checkpoint
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def load_state_dict(self, state_dict):
        masters = {parameter: state["master"] for parameter, state in self.state.items() if "master" in state}
        super().load_state_dict(state_dict)
        for parameter, master in masters.items():
            self.state[parameter]["master"] = master
