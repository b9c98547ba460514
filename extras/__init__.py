"""Beside the method: baselines, a report, probes, and a client of an inference server."""
