"""What a sharded model needs besides its mechanism: it refuses what it could not train, and says what to do instead.

Each module has one subject: the parameters of ZeRO-3, its gradients, backward, state dicts, split layers, the stages
of a pipeline, and checkpoints.
"""
