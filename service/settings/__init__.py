"""Every setting of a broker and of the command line: unit, default, reason.

No other package reads the environment.
"""
