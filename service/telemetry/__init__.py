"""Facts about a broker and its cluster: metrics, rates, lags, health, lists.

The console and the command line show the lists.
"""
