"""config.json of transformers and MLX folders: typed fields, and what each architecture makes of them."""
