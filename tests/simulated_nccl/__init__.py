"""What CI runs under simulated NCCL: wrong code that it must report, and right code that it must accept."""
