"""Connections between trainer and environment: HTTP/2 and gRPC calls."""
