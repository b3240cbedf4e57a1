"""JupyterLab's default settings for this course, and the setup of a Colab runtime."""
