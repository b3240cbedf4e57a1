"""JupyterLab's default settings for this course, its kernel, and the setup of a Colab runtime."""
