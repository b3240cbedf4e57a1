"""Settings of the server that `make lab` starts: JupyterLab loads our style sheet, so that figures follow its theme."""

from pathlib import Path

c = get_config()  # noqa: F821 (JupyterLab defines it)
c.LabApp.custom_css = True
c.ServerApp.tornado_settings = {"static_custom_path": [str(Path(__file__).with_name("custom"))]}
