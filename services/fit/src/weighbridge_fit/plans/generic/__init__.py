"""Prices by the laws of engines that are not run here: what can be asked, and one module for each law's lines."""
