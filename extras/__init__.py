"""Beside the method: the report of a run. Other methods are in methods/."""
