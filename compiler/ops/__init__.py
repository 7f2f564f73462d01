"""The op table's entries, one small file a family of ops. Importing this package fills the table."""

from halofx.compiler.ops import conv, extreme, pointwise, pool_max, reduce

__all__ = ["conv", "extreme", "pointwise", "pool_max", "reduce"]
