"""Plans for stable-diffusion.cpp's sd-server: images and video."""
