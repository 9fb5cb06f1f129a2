"""What a started ds4 is to a conversation: the part of its plan and of its build that requests depend on."""

from dataclasses import dataclass

MAX_THINKING_CONTEXT_TOKENS = 393_216
"""Below this context ds4 thinks "high" where "max" was asked for, without a word (``DS4_THINK_MAX_MIN_CONTEXT``, May
2026). V4.1 is said to have no such bound (ds4-control, September 2026). Its source was not seen, and a plan does not
say of which architecture a model is: it is held to the bound too, since a refusal can be helped and less thinking is
not noticed."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """See the module.

    Attributes:
        model_name: for people.
        context_tokens: prompt and answer together.
        sessions: conversations held at once.
        sees: whether a vision companion is loaded.
        stops_on_disconnect: whether this build gives up a request whose client is gone, also while it reads the prompt
            (builds since August 2026). Where that is not known: no.
        samples_while_thinking: whether sampling that a request asks for holds while the model thinks (builds that know
            ``--mtp-model``). Older ones draw with values of their own then. Where that is not known: no.
        max_thinking_context: tokens of context that thinking "max" needs; 0: any.
    """

    model_name: str
    context_tokens: int
    sessions: int = 1
    sees: bool = False
    stops_on_disconnect: bool = False
    samples_while_thinking: bool = False
    max_thinking_context: int = MAX_THINKING_CONTEXT_TOKENS
