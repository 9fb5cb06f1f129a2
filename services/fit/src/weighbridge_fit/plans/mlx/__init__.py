"""MLX language models: what can be asked, and the plan."""
