"""Probes and judges for model parallelism, where all ranks see the same batch and each holds a part of the model."""
