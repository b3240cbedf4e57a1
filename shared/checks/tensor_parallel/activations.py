"""How many bytes of activations a rank keeps for backward, and after it has given its tokens to the others."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.tensor_parallel.models import Model

_WIDTH = 240
# Of what is kept without sequence parallelism. In units of B · T · D elements, a layer of TinyGPT keeps 4 + 13/N then,
# and 2 + 15/N with it: the inputs of two column-parallel layers, which are gathered, and parts of everything else. On 4
# ranks, that is a fraction of 0.79.
MOST_OF_ACTIVATIONS = 0.9
_SEQUENCES = 16


def probe_saved(parallelize, seed: int, tokens: torch.Tensor, targets: torch.Tensor) -> dict[bool, int]:
    """Return the bytes that autograd saves in forward, without parameters, with and without sequence parallelism."""
    found = {}
    for sequence_parallel in (False, True):
        case = Model(head_width=4, sequence_parallel=sequence_parallel)
        model = parallelize(case.build_model(seed).to(device_here()), None, sequence_parallel)
        owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, owned=owned, saved=saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                saved[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens.to(device_here()), targets.to(device_here()))
        found[sequence_parallel] = sum(storage.nbytes() for storage in saved.values())
        loss.backward()
    return found


def tokens_divide_activations(attempt: Attempt) -> None:
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    drawn = [Model().draw_batch(generator) for _ in range(_SEQUENCES)]
    tokens, targets = map(torch.cat, zip(*drawn, strict=True))
    for rank, found in enumerate(attempt.run(probe_saved, attempt.draw_seed(), tokens, targets)):
        if found[True] > MOST_OF_ACTIVATIONS * found[False]:
            message = f"forward keeps {found[True]:,} bytes for backward with sequence parallelism"
            message += f", and {found[False]:,} bytes without it"
            hint = "Hint: which activations does a rank have for its own tokens only, and do views keep more alive?"
            raise Wrong({rank: message}, hint)
