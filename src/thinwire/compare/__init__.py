"""Training with and without compression, side by side on a slow network: `thinwire compare`.

settings   what is compared, and where
method     the names of methods, ours and PyTorch's own
place      a lab, or loopback where there can be none
rank       what runs on every host: `train` for the bundled workloads, `script` for a user's own
run        starts that, follows its events, starts anew behind a method that fails
analysis   from what ranks measured to the document that `thinwire.report` draws
"""
