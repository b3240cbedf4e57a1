"""What all checks share: exercises, verdicts, comparisons, training runs and hints."""
