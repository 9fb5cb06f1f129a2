"""Image and video pipelines of diffusers: priced, never run."""
