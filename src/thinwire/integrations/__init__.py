"""One line in the frameworks that people train with.

Each module imports its framework when it is first used: `tw.lightning`, `tw.accelerate`,
`tw.transformers`, `tw.deepspeed`, `tw.flower`, and without any framework `tw.numpy`, `tw.horovod`
and `tw.torchft`.
"""
