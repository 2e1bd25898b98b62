"""Training with and without compression, side by side on a slow network: `thinwire compare`.

settings   what is compared, and where
method     the methods by name, ours and PyTorch's own
place      a lab, or loopback where there can be none
run        starts ranks, follows their events, starts anew behind a method that fails
rank       the process on every host: its plan, its events, and a user's script in it
models     a workload's model on all ranks: replicated by DDP, or sharded by FSDP2
training   one training of a bundled workload: the hook, what is measured, the loop
counters   bytes by the kernel's count
analysis   from what ranks measured to the document and its verdict
document   the model of data.json, which `thinwire.report` draws
table      the document on a terminal
"""
