"""Pickle the results of a probe, with plain tensors as their raw bytes.

torch pickles each tensor with a whole torch.save(), which takes about 0.2 ms. A probe returns hundreds of tensors.
"""

import io
import pickle

import torch

from shared.ranks.pickles import CpuPickler


class _Packer(CpuPickler):
    def reducer_override(self, thing):
        if type(thing) is not torch.Tensor or thing.requires_grad or thing.layout is not torch.strided:
            return super().reducer_override(thing)
        if thing.is_meta or thing.numel() == 0:
            return super().reducer_override(thing)
        flat = thing.cpu().contiguous().view(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), thing.dtype, tuple(thing.shape))


def _tensor(memory: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(memory), dtype=dtype).view(shape)


def pack(found) -> bytes:
    """Pickle the result of a probe. Its tensors are on the CPU when they are loaded."""
    stream = io.BytesIO()
    _Packer(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(found)
    return stream.getvalue()


unpack = pickle.loads
