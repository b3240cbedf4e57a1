"""The instructor's tools, which students do not get: building the notebooks, releasing bundles, and grading."""
