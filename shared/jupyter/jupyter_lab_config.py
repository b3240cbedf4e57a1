"""Settings of the server that `make lab` starts: figures follow JupyterLab's theme, and its file browser lists what a
student uses. Links and terminals reach the other files."""

from pathlib import Path

from shared import progress

progress.write_bars()
c = get_config()  # noqa: F821  # pyright: ignore[reportUndefinedVariable] (JupyterLab defines it)
c.LabApp.custom_css = True
c.ServerApp.tornado_settings = {"static_custom_path": [str(Path(__file__).with_name("custom"))]}
# Our tools for tests bring this language server, whose messages would be dialogs in front of a notebook.
c.LanguageServerManager.language_servers = {"basedpyright": {"argv": [], "languages": ["python"], "version": 2}}
FOLDERS = ["benchmarks", "build", "docker", "instructor", "shared", "source", "tests", "*.egg-info"]
FILES = ["*.toml", "*.yml", "*.cff", "constraints*.txt", "Makefile", "progress.jsonl"]
PROGRAMS = ["bootstrap.py", "conftest.py", "update.py"]
PAGES = ["AGENTS.md", "CHANGELOG.md", "CLAUDE.md", "CONTRIBUTING.md"]
c.ContentsManager.hide_globs.extend([*FOLDERS, *FILES, *PROGRAMS, *PAGES])
