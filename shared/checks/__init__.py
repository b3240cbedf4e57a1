"""The checks of every lab, in one package for each module in `solutions/`.

from shared.checks import manual_ddp as check      # in a notebook
check.ManualDDP()

python -m shared.checks manual_ddp my_file.py      # at a terminal, or in a test
"""
