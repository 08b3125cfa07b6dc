"""Fit the model by which ways of running a call are chosen to what was measured on a GPU."""
