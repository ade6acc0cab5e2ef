"""Rekindle: an OpenAI-compatible server that never computes the same prompt twice."""

__version__ = "0.1.0"
