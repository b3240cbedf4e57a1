"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import copy

from torch.nn.parallel import DistributedDataParallel

from shared.planner.clusters import SITUATIONS
from solutions import production


def copies_by_ddp():
    """Cheats by using torch's DistributedDataParallel, which shards nothing.

    caught by: fully_sharded · plain
    """

    def fully_sharded(module, units=None, **options):
        return DistributedDataParallel(module)


def forgets_dtypes_on_a_mesh():
    """Ignores compute_dtype and reduce_dtype when a mesh is given.

    caught by: fully_sharded · mesh
    """

    def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
        if mesh is not None:
            return production.fully_sharded(module, units, reshard_after_forward=reshard_after_forward, mesh=mesh)
        return production.fully_sharded(module, units, compute_dtype, reduce_dtype, reshard_after_forward)


def forgets_the_root():
    """Shards the units but not the rest of the module.

    caught by: fully_sharded · plain
    """

    def fully_sharded(module, units=None, **options):
        production.broadcast_state(module)
        for unit in production.default_units(module) if units is None else units:
            production.fully_shard(unit, mesh=production.mesh_of_all_ranks(module))
        return module


def keeps_a_whole_copy():
    """Keeps a copy of the whole model in addition to the sharded one.

    caught by: fully_sharded · memory
    """

    def fully_sharded(module, units=None, **options):
        whole = copy.deepcopy(module)
        production.fully_sharded(module, units, **options)
        module.__dict__["whole"] = whole
        return module


def shards_in_eval_mode():
    """Puts the module into eval mode, so it trains without dropout.

    caught by: fully_sharded · awkward models
    """

    def fully_sharded(module, *args, **kwargs):
        return production.fully_sharded(module.eval(), *args, **kwargs)


def trains_frozen_parameters():
    """Makes every parameter trainable, so only a model without frozen parameters trains correctly.

    caught by: fully_sharded · awkward models
    """

    def fully_sharded(module, *args, **kwargs):
        return production.fully_sharded(module.requires_grad_(), *args, **kwargs)


def choice_of_five():
    """Cheats by looking up the answers to the five known situations, with DDP for all others.

    caught by: choose_strategy · what is fast
    """

    ANSWERS = {situation: production.choose_strategy(*situation) for situation in SITUATIONS.values()}

    def choose_strategy(shape, cluster, micro_batch=1):
        return ANSWERS.get((shape, cluster)) or production.Choice(0, cluster.gpus, "selective", 0.0)
