"""What a sharded model needs besides its mechanism: it refuses what it could not train, and says what to do instead.

Each module has one subject. `parameters`, `gradients`, `backward` and `states` are for ZeRO-3, `layers` for tensor
parallelism, `ownership`, `announcements` and `stages` for pipelines, and `checkpoints` for saving and resuming.
"""
