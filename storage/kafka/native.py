"""The loops over the records of a batch, in C (native.c), if the installation had a compiler.

If not `IS_BUILT`, there are no functions, and the caller does the same in Python. A build of other
code than this installation's is not used: its functions may take and return something else.
"""

VERSION = 1
"""The version of native.c whose functions the callers expect."""

try:
    from tidelog.storage.kafka import _native
except ImportError:
    IS_BUILT = False
    WHY_NOT = "the installation had no C compiler"
else:
    _version = getattr(_native, "VERSION", 0)
    IS_BUILT = _version == VERSION
    WHY_NOT = "" if IS_BUILT else f"its version is {_version}, not {VERSION}: install tidelog again"
    if IS_BUILT:
        from tidelog.storage.kafka._native import fields, walk, write

__all__ = ["IS_BUILT", "VERSION", "WHY_NOT", "fields", "walk", "write"]
