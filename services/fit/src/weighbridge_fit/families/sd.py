"""stable-diffusion.cpp's sd-server: the family's plan between its messages."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.facts import Role, WeightFormat
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.off_loop import stop_if_abandoned
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Engine, Plan
from weighbridge_fit.plans.sd.advice import advice
from weighbridge_fit.plans.sd.architecture import architecture_of_model
from weighbridge_fit.plans.sd.launch import PART_FLAGS
from weighbridge_fit.plans.sd.options import SdRequest, SdShape
from weighbridge_fit.plans.sd.plan import plan
from weighbridge_fit.plans.sd.profiles import is_rendered, profile_for
from weighbridge_fit.plans.sd.rendering import SdPlan
from weighbridge_fit.plans.sd.sizes import Tier, multiple_of, side_range, tier_size
from weighbridge_fit.recognise.stable_diffusion import Part as Component
from weighbridge_fit.solving import solve_size
from weighbridge_fit.wire.rendering import rendering_message

_TIERS = {
    plan_pb2.QUALITY_TIER_DRAFT: Tier.DRAFT,
    plan_pb2.QUALITY_TIER_STANDARD: Tier.STANDARD,
    plan_pb2.QUALITY_TIER_HIGH: Tier.HIGH,
}
_FILE_FORMATS = frozenset({WeightFormat.SAFETENSORS, WeightFormat.GGUF, WeightFormat.TORCH_CHECKPOINT})
ROLES = frozenset({*PART_FLAGS, Component.LORA})
"""Roles that the option `parts` may name."""
_LONGEST_REFERENCE = 4096


class SdFamily:
    """See `families.Family`. `backend`: what sd-server is taken to be built for where a request does not say; "": it is
    not known."""

    engine = Engine.SD
    options_name = "sd"
    workload_name = "image"

    def __init__(self, backend: str = "") -> None:
        self._backend = backend

    def recognises(self, model: Model) -> bool:
        """Whether a model whose engine nobody named is this family's."""
        facts = model.facts
        if facts.format not in _FILE_FORMATS or facts.role is not Role.MODEL:
            return False
        return is_rendered(architecture_of_model(model))

    def request(self, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> SdRequest:
        """What is asked for."""
        image, given = workload.image, _set_options(options)
        return SdRequest(
            width_px=image.width_px,
            height_px=image.height_px,
            tier=_TIERS.get(image.quality),
            batch=image.batch,
            frames=image.frames,
            reference_images=image.reference_images,
            source_images=image.source_images,
            prompt_tokens=image.prompt_tokens,
            **({"backend": self._backend} | given),
        )

    def companions(self, options: plan_pb2.EngineOptions) -> Mapping[str, str]:
        """Further files that the options name, by role."""
        for role, reference in options.sd.parts.items():
            if role not in ROLES:
                message = f"sd-server knows no part {role[:40]!r}; it knows {', '.join(sorted(ROLES))}."
                raise PlanError("INVALID_OPTION", "options.sd.parts", message)
            if not reference or len(reference) > _LONGEST_REFERENCE:
                raise PlanError("INVALID_OPTION", f"options.sd.parts[{role}]", "A part is named by its path.")
        return dict(options.sd.parts)

    def plan(self, model: Model, request: SdRequest, capacity: Capacity) -> Plan:
        """Plans one model. Raises PlanError."""
        stop_if_abandoned()
        return plan(model, request, capacity)

    def advise(
        self, model: Model, request: SdRequest, capacity: Capacity, plan: Plan, requirement: Requirement
    ) -> tuple[str, ...]:
        """What would turn a TIGHT or WONT_RUN into RUNS, and how much of it each choice saves."""

        def largest(asked: SdRequest, aspect: tuple[int, int]) -> tuple[int, int]:
            return solve_size(self, model, asked, capacity, aspect)

        def again(asked: SdRequest) -> Plan:
            return self.plan(model, asked, capacity)

        return advice(request, plan, requirement, capacity, again=again, largest=largest)

    def with_size(self, request: SdRequest, width_px: int, height_px: int) -> SdRequest:
        """The same request at another size."""
        return replace(request, width_px=width_px, height_px=height_px, tier=None)

    def size_of(self, plan: Plan) -> tuple[int, int]:
        """Width and height that were planned, in pixels."""
        shape = _shape(plan)
        return shape.width_px, shape.height_px

    def side_step(self, model: Model) -> int:
        """The multiple of pixels that the engine rounds sides up to."""
        return multiple_of(architecture_of_model(model))

    def side_range(self, model: Model) -> tuple[int, int]:
        """The smallest and the largest side that can be asked for, in pixels."""
        return side_range(model, architecture_of_model(model)).both

    def tier_size(self, model: Model, tier: Tier) -> tuple[int, int]:
        """The picture that a model makes at a tier, in pixels."""
        architecture = architecture_of_model(model)
        return tier_size(profile_for(model, architecture), tier, side_range(model, architecture))

    def workload(self, plan: Plan) -> plan_pb2.Workload:
        """The workload as planned."""
        shape = _shape(plan)
        image = plan_pb2.ImageWorkload(
            width_px=shape.width_px,
            height_px=shape.height_px,
            batch=shape.batch,
            frames=shape.frames,
            reference_images=shape.reference_images,
            source_images=shape.source_images,
            prompt_tokens=shape.prompt_tokens,
        )
        return plan_pb2.Workload(image=image)

    def options(self, plan: Plan) -> plan_pb2.EngineOptions:
        """The options as planned."""
        shape = _shape(plan)
        options = plan_pb2.SdOptions(
            vae_tiling=shape.vae_tiling,
            flash_attention=shape.flash_attention,
            diffusion_conv_direct=shape.diffusion_conv_direct,
            vae_conv_direct=shape.vae_conv_direct,
            offload_to_cpu=shape.offload,
            text_encoder_on_cpu=shape.text_encoder_on_cpu,
            vae_on_cpu=shape.vae_on_cpu,
            mmap=shape.mmap,
        )
        if shape.tile_px:
            options.vae_tile_px = shape.tile_px
        if shape.weight_type:
            options.weight_type = shape.weight_type.lower()
        if shape.tensor_type_rules:
            options.tensor_type_rules = shape.tensor_type_rules
        if shape.threads:
            options.threads = shape.threads
        if shape.backend:
            options.backend = shape.backend
        return plan_pb2.EngineOptions(sd=options)

    def launch(self, plan: Plan) -> plan_pb2.Launch | None:
        """How sd-server is started."""
        assert isinstance(plan, SdPlan)
        return plan_pb2.Launch(
            sd=plan_pb2.SdLaunch(arguments=plan.arguments, rendering=rendering_message(plan.rendering))
        )


def _set_options(options: plan_pb2.EngineOptions) -> dict[str, Any]:
    """The options that the caller has set, by name; a set false is set."""
    return {field.name: value for field, value in options.sd.ListFields() if field.name != "parts"}


def _shape(plan: Plan) -> SdShape:
    assert isinstance(plan.shape, SdShape)
    return plan.shape
