"""The op table's entries, one small file a family of ops. Importing this package fills the table."""

from halofx.compiler.ops import conv, convert, extreme, permute, pointwise, pool_average, pool_max, reduce, shape

__all__ = ["conv", "convert", "extreme", "permute", "pointwise", "pool_average", "pool_max", "reduce", "shape"]
