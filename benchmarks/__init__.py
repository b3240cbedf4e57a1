"""Measurements of the course's own machinery and of what the student builds, each run as a module."""
