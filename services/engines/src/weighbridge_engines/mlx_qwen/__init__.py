"""The MLX Qwen engine: mlx-lm's Qwen models behind an engine service, MLX itself in a child process of its own."""
