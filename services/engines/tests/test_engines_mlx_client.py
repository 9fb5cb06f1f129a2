"""The host's side of an MLX runtime, as far as no runtime is needed."""

from weighbridge_engines.mlx_qwen.client import MlxRuntimeClient


async def test_nothing_is_left_to_wait_for_when_a_call_has_ended(tmp_path):
    # The runtime stops at the end of the call itself, so nobody is asked: here there is none to ask.
    client = MlxRuntimeClient(tmp_path / "rt.sock")
    await client.settle()
    await client.aclose()
