"""Averaging units of named tensors over a group, with what has to be remembered.

Everything that averages tensors drives a `UnitReducer`; users meet it as `thinwire.Reducer` and
`thinwire.attach`.
"""
