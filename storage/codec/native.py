"""The loops over bytes in C (native.c), if the installation had a compiler.

If not `IS_BUILT`, there are no functions, and the caller does the same in Python. A build of other
code than this installation's is not used: its functions may take and return something else.
"""

VERSION = 2
"""The version of native.c whose functions the callers expect."""

try:
    from tidelog.storage.codec import _native
except ImportError:
    IS_BUILT = False
    WHY_NOT = "the installation had no C compiler"
else:
    _version = getattr(_native, "VERSION", 0)
    IS_BUILT = _version == VERSION
    WHY_NOT = "" if IS_BUILT else f"its version is {_version}, not {VERSION}: install tidelog again"
    if IS_BUILT:
        from tidelog.storage.codec._native import fields, murmur2, murmur2_column, walk, write

__all__ = [
    "IS_BUILT",
    "VERSION",
    "WHY_NOT",
    "fields",
    "murmur2",
    "murmur2_column",
    "walk",
    "write",
]
