"""The public names for engines on Arrow: `from tidelog.read import read`.

`read` returns a topic as an Arrow dataset, for Polars, pandas, DuckDB and Daft. It needs
`pip install 'tidelog[server]'`, and no broker.
"""

from tidelog.storage.read.log_dataset import LogDataset, read

__all__ = ["LogDataset", "read"]
