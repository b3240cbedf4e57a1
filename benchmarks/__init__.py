"""Benchmarks of the course's machinery and of the student's wrappers. Each one runs as a module."""
