"""The MLX child process: mlx-lm on one owner thread behind RuntimeService on a Unix socket.

Run as ``python -m weighbridge_engines.mlx_qwen.runtime --socket PATH``. The host starts it, holds its standard input,
and is its only caller. Everything that touches MLX runs on the owner thread (``owner``); gRPC's loop hands work in
and takes results out.
"""
