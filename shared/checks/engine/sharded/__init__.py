"""What the checks of ZeRO share: training plans, layouts of flat tensors, state dicts, communication and memory."""
