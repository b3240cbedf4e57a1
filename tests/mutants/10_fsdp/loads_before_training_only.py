"""Ignores load_full_state_dict() once it has been trained.

caught by: ZeRO3 · another world size
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    was_trained = False

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self.was_trained = True

    def load_full_state_dict(self, state_dict):
        if not self.was_trained:
            super().load_full_state_dict(state_dict)
