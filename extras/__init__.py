"""Beside the method: baselines, a report, and a client of an inference server."""
