"""Capture: one run of a model on fake inputs becomes a `halofx.compiler.program.Program`."""

from halofx.compiler.capture.run import capture

__all__ = ["capture"]
