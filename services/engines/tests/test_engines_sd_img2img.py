"""Whether a model starts from a source image: what is said of it, then what was tried, then its kind of weights."""

import itertools

import pytest
from weighbridge_engines.sd_server.img2img import why_not_from_source
from weighbridge_proto.fit.v1 import plan_pb2


def why_not(explicit=None, assessed=None, weights_kind="checkpoint"):
    rendering = plan_pb2.SdRendering(
        starts_from_source=explicit, assessed_starts_from_source=assessed, weights_kind=weights_kind
    )
    return why_not_from_source(rendering, "some-model")


@pytest.mark.parametrize(
    ("assessed", "kind"), list(itertools.product((None, True, False), ("checkpoint", "diffusion-model")))
)
def test_the_catalogues_word_is_the_first(assessed, kind):
    assert why_not(True, assessed, kind) == ""
    assert "catalogue entry says" in why_not(False, assessed, kind)


@pytest.mark.parametrize("kind", ["checkpoint", "diffusion-model", ""])
def test_an_assessment_is_the_next(kind):
    assert why_not(None, True, kind) == ""
    assert "was assessed" in why_not(None, False, kind)


@pytest.mark.parametrize("kind", ["checkpoint", ""])
def test_checkpoints_and_weights_that_do_not_say_start_from_a_source(kind):
    assert why_not(None, None, kind) == ""


def test_other_weights_are_not_verified():
    assert "Nobody has verified" in why_not(None, None, "diffusion-model")


def test_each_reason_names_the_model_and_is_a_sentence_of_its_own():
    reasons = {why_not(False), why_not(None, False), why_not(None, None, "diffusion-model")}
    assert len(reasons) == 3
    assert all("some-model" in reason and reason.endswith(".") for reason in reasons)
