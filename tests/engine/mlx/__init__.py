import rekindle.engine.mlx  # noqa: F401  # before mlx_lm, whose import it makes harmless
