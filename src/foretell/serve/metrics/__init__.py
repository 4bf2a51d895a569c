"""Measurements of a running server: Prometheus metrics and structured logs."""
