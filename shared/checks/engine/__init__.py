"""What every lab's checks are made of: exercises and verdicts, candidates, comparisons, training runs, hints."""
