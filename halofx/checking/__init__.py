"""Proving a compiled model equal to one device, and finding the first node that is not."""
