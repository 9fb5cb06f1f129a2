"""Working memory of diffusers pipelines: one formula each, pure. Factors are passed in; units are bytes and pixels.

torch holds activations in the type that a component computes in, so every formula has that width as a factor.
"""


def latent_frames(frames: int, temporal: int) -> int:
    """Frames of the latent: the first stands alone, the others are joined `temporal` at a time."""
    return 1 + (frames - 1 + temporal - 1) // temporal


def video_tokens(width_px: int, height_px: int, frames: int, patch_px: int, temporal: int) -> int:
    """Tokens of one video: a token covers `patch_px` squared pixels of one latent frame."""
    return (width_px // patch_px) * (height_px // patch_px) * latent_frames(frames, temporal)


def token_activations(tokens: int, width: int, element_bytes: int, elements: float) -> int:
    """A transformer's live activations: linear in tokens and width, because fused attention keeps no scores."""
    return int(tokens * width * element_bytes * elements)


def sliced_scores(tokens: int) -> int:
    """Scores of one head in 32 bits, where attention is computed head by head instead of fused."""
    return tokens * tokens * 4


def decode_by_area(area_px: int, element_bytes: int, factor: float) -> int:
    """An autoencoder's pass over one picture, or over a video one latent frame at a time."""
    return int(area_px * element_bytes * factor)


def kept_frames(area_px: int, frames: int, element_bytes: int, elements: float) -> int:
    """What has been decoded of a video while the rest is."""
    return int(area_px * frames * element_bytes * elements)


def decode_whole_video(area_px: int, frames: int, element_bytes: int, slope: float, fixed: float) -> int:
    """An autoencoder's pass over all frames at once; `slope` is for elements of two bytes."""
    return int(area_px * frames * slope * element_bytes / 2 + fixed)
