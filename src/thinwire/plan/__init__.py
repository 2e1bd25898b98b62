"""Will it pay? A cost model of training steps, and a simulator for more ranks than we have."""
