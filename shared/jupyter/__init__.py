"""JupyterLab's defaults for this course, and what a Colab runtime needs."""
