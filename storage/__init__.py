"""The log: its records, its state, its encoded bytes, and the stores that hold the bytes.

No HTTP. The layers of the packages are in pyproject.toml; import-linter checks them. `public` has
the modules that users import (`tidelog.spark`), which are installed in `tidelog`.
"""
