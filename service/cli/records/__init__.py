"""The work of `tidelog produce`, `consume` and `topics skew`. The options of the first two are in
service.cli.produce_consume."""
