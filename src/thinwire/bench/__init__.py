"""What each compressor costs and brings on this machine: `thinwire bench`.

`settings` says what is to be measured, on which `tensors`; `run` measures it, by `measure` (size,
error, time), `eager` (the same in plain PyTorch) and `memory`; `results` holds what came out, and
`table` and `picture` show it. Nothing heavy is imported with this package.
"""
