"""The op table's entries, one small file a family of ops. Importing this package fills the table."""

from halofx.compiler.ops import conv, pointwise, reduce

__all__ = ["conv", "pointwise", "reduce"]
