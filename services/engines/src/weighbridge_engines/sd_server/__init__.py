"""The sd-server engine: images from stable-diffusion.cpp's server, run as a process of its own."""
