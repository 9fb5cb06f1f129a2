"""What can be asked of a ds4 plan, checked, and the launch as it is planned."""

from dataclasses import dataclass

from weighbridge_fit.calibration.ds4 import Compute, Layout
from weighbridge_fit.plans.ds4.drafting import Drafter, DraftPolicy
from weighbridge_fit.plans.ds4.machine import Ds4Machine
from weighbridge_fit.plans.ds4.policy import AuthorFigures, launch_context
from weighbridge_fit.plans.ds4.shape import Ds4Weights, Family
from weighbridge_fit.plans.errors import PlanError

# ds4's own ring and queue know no bound; more conversations than this are no single machine's.
MAX_SESSIONS = 64
MAX_CACHE_GIB = 1 << 14
# Above any published model's, and below what makes sizes overflow.
LONGEST_ASKED = 1 << 24
MAX_CHUNK_TOKENS = 65_536
FULL_POWER = 100
# ds4's defaults: 2,048 in May 2026, 4,096 since July, 8,192 for PRO and for V4.1 at 16,384 tokens and more.
MAY_CHUNK, JULY_CHUNK, LARGE_CHUNK = 2048, 4096, 8192


@dataclass(frozen=True, slots=True)
class Ds4Request:
    """A workload and options as asked; None and zero are defaults."""

    context_tokens: int = 0
    slots: int = 0
    sessions: int | None = None
    stream_experts: bool | None = None
    expert_cache_gib: int | None = None
    prefill_chunk_tokens: int | None = None
    draft_policy: str | None = None
    vision: bool | None = None
    disk_kv: bool | None = None
    power: str | None = None
    engine_layout: str | None = None
    compute: str | None = None


@dataclass(frozen=True, slots=True)
class Basics:
    """What is settled before anything is weighed."""

    context_tokens: int
    sessions: int
    chunk_tokens: int
    chunk_is_usual: bool
    layout: Layout
    policy: DraftPolicy
    power: int
    disk_kv: bool


@dataclass(frozen=True, slots=True)
class Ds4Shape:
    """A launch as planned. `expert_cache_gib` 0: experts are not streamed."""

    compute: Compute
    layout: Layout
    context_tokens: int
    sessions: int
    chunk_tokens: int
    streams: bool
    expert_cache_gib: int
    drafter: Drafter
    policy: DraftPolicy
    vision: bool
    power: int
    disk_kv: bool

    def text(self) -> str:
        """Canonical text: launches with the same text cost the same."""
        weights = f"streamed/{self.expert_cache_gib}" if self.streams else "resident"
        return (
            f"ds4;compute={self.compute.value};layout={self.layout.value};weights={weights};"
            f"context={self.context_tokens};sessions={self.sessions};chunk={self.chunk_tokens};"
            f"drafter={self.drafter.value};vision={'on' if self.vision else 'off'};"
            f"power={self.power};disk_kv={'on' if self.disk_kv else 'off'}"
        )


def settle(request: Ds4Request, weights: Ds4Weights, machine: Ds4Machine, figures: AuthorFigures) -> Basics:
    """Fills defaults in and refuses what cannot be. Raises PlanError: CONTEXT_TOO_LONG, INVALID_OPTION."""
    layout = _layout(request, weights)
    sessions = _sessions(request, layout)
    context = _context(request, weights, machine, figures)
    usual = _usual_chunk(weights, layout, context)
    chunk = _chunk(request, weights, layout, usual)
    return Basics(
        context_tokens=context,
        sessions=sessions,
        chunk_tokens=chunk,
        chunk_is_usual=chunk == usual,
        layout=layout,
        policy=_policy(request),
        power=_power(request, weights, layout),
        disk_kv=request.disk_kv is not False,
    )


def _invalid(option: str, message: str) -> PlanError:
    return PlanError("INVALID_OPTION", f"options.ds4.{option}", message)


def _layout(request: Ds4Request, weights: Ds4Weights) -> Layout:
    if request.engine_layout is None:
        return Layout.JULY
    try:
        layout = Layout(request.engine_layout)
    except ValueError:
        known = " and ".join(layout.value for layout in Layout)
        raise _invalid("engine_layout", f"Memory layouts are known of the builds of {known}.") from None
    if layout is Layout.MAY and weights.family is not Family.V4:
        raise _invalid("engine_layout", "Builds of May 2026 load DeepSeek V4 only.")
    return layout


def _sessions(request: Ds4Request, layout: Layout) -> int:
    if request.sessions is not None and request.slots and request.sessions != request.slots:
        message = f"The workload asks for {request.slots} conversations at once, the options for {request.sessions}."
        raise _invalid("sessions", message)
    sessions = request.slots or 1 if request.sessions is None else request.sessions
    if not 1 <= sessions <= MAX_SESSIONS:
        message = f"Between 1 and {MAX_SESSIONS} sessions can be held, {sessions} were asked for."
        field = "workload.chat.slots" if request.sessions is None else "options.ds4.sessions"
        raise PlanError("INVALID_OPTION", field, message)
    if sessions > 1 and layout is Layout.MAY:
        raise _invalid("sessions", "Builds before July 2026 hold one session.")
    return sessions


def _context(request: Ds4Request, weights: Ds4Weights, machine: Ds4Machine, figures: AuthorFigures) -> int:
    field = "workload.chat.context_tokens"
    asked, longest = request.context_tokens, weights.longest_context
    if not asked:
        return launch_context(
            ram_bytes=machine.ram_bytes, author_cap=figures.max_launch_context_tokens, model_longest=longest
        )
    if asked < 1:
        raise PlanError("INVALID_OPTION", field, "A context needs at least one token.")
    if asked > min(longest, LONGEST_ASKED):
        message = f"The model was made for at most {longest:,} tokens, a context of {asked:,} was asked for."
        raise PlanError("CONTEXT_TOO_LONG", field, message)
    return asked


def _usual_chunk(weights: Ds4Weights, layout: Layout, context: int) -> int:
    """What ds4 reads a prompt in where nobody says."""
    if layout is Layout.MAY:
        return MAY_CHUNK
    if weights.pro or (weights.family is Family.V41 and context >= 2 * LARGE_CHUNK):
        return LARGE_CHUNK
    return JULY_CHUNK


def _chunk(request: Ds4Request, weights: Ds4Weights, layout: Layout, usual: int) -> int:
    asked = request.prefill_chunk_tokens
    if asked is None or asked == usual:
        return usual
    if layout is Layout.MAY:
        raise _invalid("prefill_chunk_tokens", f"Builds before July 2026 read prompts in {MAY_CHUNK:,} tokens.")
    if weights.family is Family.GLM:
        raise _invalid("prefill_chunk_tokens", "ds4 takes no chunk for GLM.")
    if weights.family is Family.V41:
        raise _invalid("prefill_chunk_tokens", f"What V4.1 holds is known for ds4's own chunk of {usual:,} only.")
    if not 1 <= asked <= MAX_CHUNK_TOKENS:
        message = f"A prefill chunk has between 1 and {MAX_CHUNK_TOKENS:,} tokens, {asked:,} were asked for."
        raise _invalid("prefill_chunk_tokens", message)
    return asked


def _policy(request: Ds4Request) -> DraftPolicy:
    if request.draft_policy is None:
        return DraftPolicy.AUTO
    try:
        return DraftPolicy(request.draft_policy)
    except ValueError:
        raise _invalid("draft_policy", "Drafting is off, on or auto.") from None


def _power(request: Ds4Request, weights: Ds4Weights, layout: Layout) -> int:
    if request.power is None:
        return FULL_POWER
    text = request.power
    power = int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else 0
    if not 1 <= power <= FULL_POWER:
        raise _invalid("power", "ds4 names its power as a whole number from 1 to 100.")
    if power != FULL_POWER and layout is Layout.MAY:
        raise _invalid("power", "Builds before July 2026 know no power level.")
    if power != FULL_POWER and weights.family in (Family.V41, Family.GLM):
        raise _invalid("power", "ds4 runs V4.1 and GLM at power 100 only.")
    return power
