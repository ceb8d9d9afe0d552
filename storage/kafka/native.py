"""The loops over the records of a batch, in C (native.c), if the installation had a compiler.

If not `IS_BUILT`, there are no functions, and the caller does the same in Python.
"""

try:
    from tidelog.storage.kafka._native import fields, walk, write
except ImportError:
    IS_BUILT = False
else:
    IS_BUILT = True

__all__ = ["IS_BUILT", "fields", "walk", "write"]
