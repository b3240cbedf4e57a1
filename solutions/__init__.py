"""The course's own solutions, built from source/: importable by later chapters and by torchrun."""
