"""Working buffers of stable-diffusion.cpp, one per phase: text, diffusion, autoencoder. Only the largest counts."""
