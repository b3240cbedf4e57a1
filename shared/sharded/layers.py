"""Layers that are split over ranks: what splitting them would lose, and what a whole layer would have checked."""

import functools
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared import models
from shared.guards.alarms import Alarm
from shared.guards.tensors import reject_shared_memory
from shared.sharded.parts import mark, mark_local
from shared.sharded.sequences import expect_same_first_batch

IGNORED = -100  # the target that torch's cross_entropy ignores by default

# A GPT's attention is divided. Other layers that compute a token from its neighbors, or from the batch, are not.
_MIX_TOKENS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.RNNBase)
_MIX_TOKENS += (nn.MultiheadAttention, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd)
_MIX_TOKENS += (nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd)


def like(whole: Tensor, shard: Tensor) -> Tensor:
    """Make the shard of a parameter a parameter, which is frozen if the whole one is."""
    return nn.Parameter(shard, whole.requires_grad) if isinstance(whole, nn.Parameter) else shard


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter as it is, and train any other tensor."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def as_shard(tensor: Tensor, group: dist.ProcessGroup | None) -> nn.Parameter:
    """Do what as_parameter() does for a tensor of which each rank has a shard, and tell torch's optimizers about it."""
    shard = as_parameter(tensor)
    clip_with = "add up the squares over the ranks, as clip_grad_norm_() of ParallelGPT and of Parallel3D does"
    mark_local([shard], group, clip_with, is_split=True)
    return shard


def expect_own_shards(layer: nn.Module, *names: str) -> None:
    """Let a split layer raise a RuntimeError in forward, if its parameters of these names are no longer its own.

    weight_norm() and pruning, for example, compute them from new parameters, each rank from its shard.
    """
    layer.register_forward_pre_hook(functools.partial(_reject_computed, names))


def _reject_computed(names: tuple[str, ...], layer: nn.Module, _inputs: tuple) -> None:
    for name in names:
        if name not in layer._parameters and getattr(layer, name) is not None:
            now = [f"{name} {list(p.shape)}" for name, p in layer.named_parameters()]
            raise RuntimeError(
                f"{name!r} of a {type(layer).__name__} is computed from other parameters now (it has {now}), for "
                "example by weight_norm() or pruning, but each rank would compute it from its shard: leave a layer as "
                "it is after splitting it"
            )


def expect_same(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None, **settings: object) -> None:
    """Raise a ValueError on every rank if their tensors have other names, shapes, dtypes or values, or share memory.

    Args:
        settings: What else must be the same on all ranks.

    Communication: one all-gather of two integers, which the ledger does not see.
    """
    own = dict(named)
    reject_shared_memory(own)
    tensors = {name: tensor.detach() for name, tensor in own.items()}
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    if device.type != "meta":
        lines = [
            f"{name}: {list(t.shape)} in {str(t.dtype).removeprefix('torch.')} with the sum "
            f"{t.sum(dtype=torch.float64):.17g}"
            for name, t in tensors.items()
        ]
        lines += [f"{name}={value}" for name, value in settings.items()]
        Alarm(group).compare(lines, device)


def expect_plain_gpt(model: models.TinyGPT, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if a model cannot be split, or is another one on another rank, or gets another first batch.

    Only the embedding and the output layer may have the same weight: other layers would split a copy each.
    """
    expect_methods_of(model, models.TinyGPT)
    if model.position_embedding.max_norm is not None:
        raise ValueError("cannot split a model whose position_embedding has a max_norm: build it without")
    for name, layer in model.named_modules():
        if isinstance(layer, models.Attention) and type(layer).forward is not models.Attention.forward:
            raise ValueError(f"cannot split {name!r}, a {type(layer).__name__} with a forward() of its own")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        if len(tied) > 1 and tied != ["token_embedding.weight", "output.weight"]:
            raise ValueError(
                f"{tied[0]!r} and {tied[1]!r} are the same parameter, but each layer would split a copy of its own: "
                "give each layer its own parameters"
            )
    expect_same(model.named_parameters(), group)
    expect_same_first_batch(model, group)
    _mark_replaced(model)
    for layer in model.modules():
        if layer._parameters and not isinstance(layer, nn.Linear | nn.Embedding):  # such as a norm
            layer.register_forward_pre_hook(_reject_reentrant_checkpoint)


def _mark_replaced(model: nn.Module) -> None:
    """Let optimizers raise that still have the parameters of before the model was split, once it has a forward."""
    before = [weakref.ref(parameter) for parameter in model.parameters()]

    def mark_those(_model: nn.Module, _inputs: tuple) -> None:
        handle.remove()
        now = {*model.parameters()}
        replaced = [parameter for each in before if (parameter := each()) is not None and parameter not in now]
        mark(replaced, instead_of_step="build it after splitting, with the parameters() that the model has then")

    handle = model.register_forward_pre_hook(mark_those)


def expect_methods_of(model: models.TinyGPT, kind: type[models.TinyGPT]) -> None:
    """Raise a ValueError if a GPT computes something else than this kind of GPT, which would be lost."""
    if not isinstance(model, kind):  # such as the Decoder of the dry run
        return
    for name in ("forward", "predict"):
        if getattr(type(model), name, None) is not getattr(kind, name) or name in vars(model):
            raise ValueError(
                f"cannot divide a {type(model).__name__}, whose {name}() is not that of {kind.__name__}: change its "
                "loss or its layers in the divided model instead"
            )
    for block in model.blocks:
        if type(block) is not models.Block:
            raise ValueError(f"cannot divide a {type(block).__name__}: this takes GPTs whose blocks have a plain MLP")
    for name, layer in model.named_modules():
        if isinstance(layer, _MIX_TOKENS):
            raise ValueError(
                f"cannot divide {name!r}, a {type(layer).__name__}: it mixes tokens, of which other ranks may have some"
            )


def _reject_reentrant_checkpoint(layer: nn.Module, _inputs: tuple) -> None:
    """Raise a RuntimeError if forward has replaced a layer's parameters by copies, but computes it without gradients.

    Reentrant checkpointing does. It computes the layer again when forward is over, with the parameters themselves.
    """
    copies = any(getattr(each, "grad_fn", None) is not None for each in layer._parameters.values())
    if copies and not torch.is_grad_enabled():
        raise RuntimeError(
            f"checkpoint(..., use_reentrant=True) would lose gradients of this {type(layer).__name__}, which are added "
            "up over the ranks: pass use_reentrant=False"
        )


def expect_plain_moe(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    """Return the mixtures of experts of a module, by name.

    Raises:
        ValueError: if dividing their experts would lose something.
    """
    layers = {path: layer for path, layer in module.named_modules(remove_duplicate=False) if isinstance(layer, kind)}
    if "" in layers:
        raise ValueError(
            f"there is no {kind.__name__} inside a {type(module).__name__}: wrap the model that contains it"
        )
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for path, layer in layers.items():
        for parameter in layer.parameters():
            if len(names[parameter]) > 1:
                one, other = names[parameter][:2]
                raise ValueError(
                    f"{one!r} and {other!r} are the same parameter, but each would become one of its own: "
                    "give each layer its own parameters"
                )
        hooks = [layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks]
        hooks += [parameter._backward_hooks for parameter in layer.parameters()]
        if type(layer) is not kind or {*layer._modules} != {"router", "experts"} or layer._parameters or any(hooks):
            raise ValueError(
                f"cannot divide {path!r}, a {type(layer).__name__} with hooks, parameters or layers of its own, "
                f"because they would be lost: use a plain {kind.__name__}"
            )
    return layers


def expect_plain(layer: nn.Module, kind: type[nn.Module], group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if a layer cannot be split.

    It may compute something that would be lost when its parameters are split, or have other values on another rank.
    """
    hooks = [layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks]
    hooks += [parameter._backward_hooks for parameter in layer.parameters()]
    has_own_forward = type(layer).forward is not kind.forward or "forward" in vars(layer)
    if has_own_forward or "weight" not in layer._parameters or layer._modules or any(hooks):
        raise ValueError(
            f"cannot split a {type(layer).__name__} that has hooks, a parametrization or a forward() of its own, "
            f"because they would be lost: split a plain {kind.__name__}"
        )
    expect_same(layer.named_parameters(), group)


def expect_plain_embedding(embedding: nn.Embedding, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if an embedding cannot be split: see expect_plain()."""
    for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, setting, False):
            raise ValueError(f"cannot split an embedding with {setting}: build it without")
    expect_plain(embedding, nn.Embedding, group)


def own_padding_idx(embedding: nn.Embedding, own_rows: int, group: dist.ProcessGroup | None) -> int | None:
    """Return the index of an embedding's padding among this rank's rows, or None if it is not there."""
    if embedding.padding_idx is None:
        return None
    row = embedding.padding_idx - dist.get_rank(group) * own_rows
    return row if 0 <= row < own_rows else None


def expect_in_vocabulary(tokens: Tensor, vocabulary: int, ignored: int | None = None) -> None:
    """Raise an IndexError for a token that no rank has. On a GPU, the assertion of torch waits for nothing."""
    if type(tokens) is not Tensor or tokens.is_meta or torch.compiler.is_compiling():
        return
    is_known = (tokens >= 0) & (tokens < vocabulary)
    is_known = is_known if ignored is None else is_known | (tokens == ignored)
    if tokens.device.type != "cpu":
        torch._assert_async(is_known.all(), f"a token is not in the vocabulary of {vocabulary}")
    elif not is_known.all():
        wrong = tokens[~is_known][0].item()
        raise IndexError(f"there is a token {wrong}, but the vocabulary has {vocabulary}, from 0 to {vocabulary - 1}")


def mean_without(losses: Tensor, is_ignored: Tensor) -> Tensor:
    """Return the mean of the losses that count. If none does, it is nan, as in torch's cross_entropy."""
    return losses.masked_fill(is_ignored, 0).sum() / (~is_ignored).sum()


def expect_equally_ignored(targets: Tensor, micro_batches: int) -> None:
    """Raise a ValueError if the mean over micro-batches is not that over the targets that count."""
    if targets.is_meta or len(targets) % micro_batches or not (targets == IGNORED).any():
        return
    ignored = (targets == IGNORED).view(micro_batches, -1).sum(1)
    if (ignored != ignored[0]).any():
        raise ValueError(
            f"the micro-batches have {ignored.tolist()} targets of {IGNORED}, which the loss ignores, so the mean of "
            "their losses is not the mean over all targets: let all micro-batches have equally many"
        )
