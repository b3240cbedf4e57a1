"""What students do not get: the build of the notebooks, bundles for students, and grading."""
