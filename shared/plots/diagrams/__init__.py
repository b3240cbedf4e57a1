"""Diagrams of mechanisms: what is where, and what moves where.

    diagrams.collective("all_reduce")    # as the last line of a cell

Unlike the other figures, they show how something works, so their data are made up. They still follow the rules of the
mechanism: what a rank holds after a collective, and the time at which a bucket is launched, are computed.
"""

from shared.plots.diagrams.backward import buckets, exposed_communication, hooks
from shared.plots.diagrams.checkpoints import atomic_save, background_save
from shared.plots.diagrams.collectives import collective, ring, tree_broadcast
from shared.plots.diagrams.compression import local_sgd, low_rank, quantized_all_reduce, top_k
from shared.plots.diagrams.experts import expert_fold, hidden_exchanges, top_1_routing, two_all_to_alls
from shared.plots.diagrams.fsdp import fsdp_hooks, per_parameter, streams
from shared.plots.diagrams.hosts import cluster_of_hosts, data_parallelism, hybrid_mesh, mesh_3d, processes
from shared.plots.diagrams.layouts import five_products, placements, tiled_weight
from shared.plots.diagrams.memory import deferred_init, training_memory
from shared.plots.diagrams.sequences import causal_orders, ring_attention, tokens_for_heads
from shared.plots.diagrams.sharding import bucket_owners, zero1_step
from shared.plots.diagrams.tensor import conjugate_operators, sequence_parallel, split_heads, split_loss, split_matrix
from shared.plots.diagrams.units import unit, unit_states
