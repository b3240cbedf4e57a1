"""What the checks of ZeRO share: training plans, layouts of flat tensors, state dicts, and their wire and memory."""
