"""Beside the method: tables of finished evaluations, the report of a run, SGSD and GRPO on TRL.

Other methods are in methods/.
"""
