"""Probes and judges for model parallelism: all ranks see the same batch, and each holds a piece of the model."""
