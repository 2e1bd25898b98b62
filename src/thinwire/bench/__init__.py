"""What each compressor costs and brings on this machine: `thinwire bench`.

`settings` says what is to be measured and `run` measures it; `result` holds what came out, and
`table`, `document`, `plot` and `page` show it. Nothing heavy is imported with this package.
"""
