"""Does not zero the flat tensor, so the padding holds arbitrary values.

caught by: FlatParameter · layout
"""

from unittest import mock

from solutions import flat as right


class _Layout(right.FlatLayout):
    def new_flat(self, dtype=None):
        return super().new_flat(dtype).fill_(7)


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        with mock.patch.object(right, "FlatLayout", _Layout):
            super().__init__(parameters, group)
