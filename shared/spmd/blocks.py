"""One training step of a TinyGPT block on 2 × 2 ranks, in three ways: with FSDP along "dp" and TP along "tp".

    in_ours, up = blocks.our_step(mesh, async_collectives, tensor_parallel, zero3)     # on every rank
    in_dtensor = blocks.dtensor_step(mesh, up)                                         # on every rank
    program, inputs = blocks.jax_program(devices)                                      # in the notebook

All three start with the same weights and the same batch. The weights of queries, keys and values are split by head.
"""

# torch says that operations on DTensors return plain Tensors, and calls the result of local_map() a PyTree.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false

from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from shared import spmd, wire
from shared.models import Block, GPTConfig
from shared.spmd import Collective

_UP = 6  # the index of the first weight of the MLP
_R = Replicate()
_WHOLE, _BOTH = [_R, _R], [Shard(0), Shard(1)]
_PLACES = [_WHOLE, _WHOLE, [Shard(3), Shard(1)], _BOTH, _WHOLE, _WHOLE, [Shard(1), Shard(0)], _BOTH]


def _block_and_batch() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block(GPTConfig()), torch.randn(8, 64, 64)


def our_step(
    mesh: DeviceMesh, async_collectives: ModuleType, tensor_parallel: ModuleType, zero3: ModuleType
) -> tuple[list[Collective], Tensor]:
    """Take the step with your ZeRO3 and your layers. Returns its collectives, and the updated weight of `up`.

    On gloo, your all-gathers and reduce-scatters send shards directly from rank to rank. Here they are collectives, so
    that the ledger shows them as such. The arguments are your modules.
    """
    groups = _groups(mesh)
    dp, tp = groups.values()
    block, x = _block_and_batch()
    block.attention = tensor_parallel.ParallelAttention.from_attention(block.attention, tp)
    block.up = tensor_parallel.ColumnParallelLinear.from_linear(block.up, tp)
    block.down = tensor_parallel.RowParallelLinear.from_linear(block.down, tp)
    direct = async_collectives.exchanges_directly
    async_collectives.exchanges_directly = lambda *_: False
    try:
        ours = zero3.ZeRO3(nn.Sequential(block.to(mesh.device_type)), group=dp)
        with wire.ledger() as log:
            ours(x.chunk(2)[dist.get_rank(dp)].to(mesh.device_type)).square().mean().backward()
            ours.finish_gradient_sync()
        torch.optim.SGD(ours.parameters(), lr=1.0).step()
        return spmd.of_ledger(log, groups), ours.full_state_dict()["0.up.weight"]
    finally:
        async_collectives.exchanges_directly = direct


def _groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    return {name: mesh.get_group(name) for name in ("dp", "tp")}


def dtensor_step(mesh: DeviceMesh, up: Tensor) -> list[Collective]:
    """Take the step with DTensors, check that it gives the same weight of `up`, and return its collectives."""
    block, x = _block_and_batch()
    weights = [parameter.detach() for parameter in block.parameters()]
    weights[2] = weights[2].unflatten(0, (3, 4, 16))  # queries, keys and values, by head
    pairs = zip(weights, _PLACES, strict=True)
    own = [nn.Parameter(distribute_tensor(each.to(mesh.device_type), mesh, place)) for each, place in pairs]
    samples = distribute_tensor(x.to(mesh.device_type), mesh, [Shard(0), _R])
    with wire.ledger() as log:
        _dtensor_block(own, samples).square().mean().backward()
        # No gradient stays Partial: each gets the placements of its weight.
        for each in own:
            each.grad = each.grad.redistribute(placements=each.placements)
    torch.optim.SGD(own, lr=1.0).step()
    groups = _groups(mesh)
    own_rows = own[_UP].full_tensor().chunk(2)[dist.get_rank(groups["tp"])]
    assert torch.allclose(up, own_rows, atol=1e-5)
    return spmd.of_ledger(log, groups)


def _keep(y: Tensor) -> Tensor:
    """Give activations outside of a pair of layers the layout of the batch."""
    return y.redistribute(placements=[Shard(0), _R])


def _unshard(weight: Tensor) -> Tensor:
    """Gather a weight along "dp"."""
    return weight.redistribute(placements=[_R, weight.placements[1]])


def _dtensor_block(weights: list[Tensor], x: Tensor) -> Tensor:
    # DTensor has no rule for fused attention on a CPU, so it runs on the rank's own samples and heads.
    by_head = [Shard(0), Shard(1)]  # (B, H, T, D/H): samples along "dp", heads along "tp"
    attend = partial(scaled_dot_product_attention, is_causal=True)
    attend = local_map(attend, out_placements=(by_head,), in_placements=(by_head,) * 3)
    gain_1, bias_1, query_key_value, project, gain_2, bias_2, up, down = map(_unshard, weights)
    y = _keep(layer_norm(x, (64,), gain_1, bias_1))
    split = linear(y, query_key_value.flatten(0, 2)).unflatten(-1, (3, 4, 16))
    mixed = attend(*split.permute(2, 0, 3, 1, 4))
    x = x + _keep(linear(mixed.transpose(1, 2).flatten(2), project))
    y = _keep(layer_norm(x, (64,), gain_2, bias_2))
    return x + _keep(linear(gelu(linear(y, up)), down))


def jax_program(devices):
    """Compile the step for a mesh of JAX devices. Returns the program, which updates the weights, and its inputs.

    Its only annotations are the partition specs of the weights and of the batch.
    """
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    specs = [P(), P(), P(None, "tp", None, "dp"), P("dp", "tp"), P(), P(), P("tp", "dp"), P("dp", "tp")]
    block, x = _block_and_batch()
    arrays = [parameter.detach().numpy() for parameter in block.parameters()]
    arrays[2] = arrays[2].reshape(3, 4, 16, 64)
    pairs = zip(arrays, specs, strict=True)
    weights = [jax.device_put(each, NamedSharding(devices, spec)) for each, spec in pairs]
    inputs = weights, jax.device_put(x.numpy(), NamedSharding(devices, P("dp")))
    return jax.jit(_jax_step).lower(*inputs).compile(), inputs


def _jax_step(weights: list, x):
    import jax
    from jax import numpy as jnp

    gradients = jax.grad(lambda weights: jnp.square(_jax_block(weights, x)).mean())(weights)
    return [weight - gradient for weight, gradient in zip(weights, gradients, strict=True)]


def _jax_block(weights: list, x):
    import jax
    from jax import numpy as jnp

    def norm(x, gain, bias):
        return jax.nn.standardize(x, epsilon=1e-5) * gain + bias

    gain_1, bias_1, query_key_value, project, gain_2, bias_2, up, down = weights
    # c: query, key or value; h: the head; k: the element in a head
    split = jnp.einsum("btd,chkd->cbthk", norm(x, gain_1, bias_1), query_key_value)
    mixed = jax.nn.dot_product_attention(*split, is_causal=True)
    x = x + mixed.reshape(x.shape) @ project.T
    inner = jax.nn.gelu(norm(x, gain_2, bias_2) @ up.T, approximate=False)
    return x + inner @ down.T
