"""Beside the method: tables of finished evaluations, the report of a run, SGSD on TRL.

Other methods are in methods/.
"""
