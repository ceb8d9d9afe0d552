"""Facts about a broker and its cluster: metrics, rates, lags, health, lists for the console and the
command line."""
