"""Image and video pipelines of diffusers: the family's plan between its messages. Priced, never launched."""

from collections.abc import Mapping
from dataclasses import replace

from weighbridge_common.sizes import format_gib
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.catalog.entry import Use
from weighbridge_fit.facts import WeightFormat
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.off_loop import stop_if_abandoned
from weighbridge_fit.plans.diffusers.options import DiffusersRequest, DiffusersShape, side_range
from weighbridge_fit.plans.diffusers.pipelines import is_pipeline, known_facts, pipeline_of
from weighbridge_fit.plans.diffusers.plan import plan
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Engine, Plan
from weighbridge_fit.verdict import Verdict, judge

LAW = "diffusers"
_SCALES = {
    plan_pb2.QUALITY_TIER_DRAFT: 0.5,
    plan_pb2.QUALITY_TIER_STANDARD: 1.0,
    plan_pb2.QUALITY_TIER_HIGH: 1.5,
}
# Options of the same message that are for other laws.
_OTHERS = frozenset({"kv_type", "micro_batch_tokens", "device_share"})


class DiffusersFamily:
    """See `families.Family`. An ImageFamily of the engine GENERIC."""

    engine = Engine.GENERIC
    options_name = "generic"
    workload_name = "image"

    def recognises(self, model: Model) -> bool:
        """Whether a model whose engine nobody named is a diffusers tree."""
        if model.entry is not None:
            return model.entry.engine is Engine.GENERIC and model.entry.use in (Use.IMAGE, Use.VIDEO)
        stored = model.facts.format in (WeightFormat.DIFFUSERS, WeightFormat.MIXED, WeightFormat.TORCH_CHECKPOINT)
        return stored and is_pipeline(model.facts)

    def companions(self, options: plan_pb2.EngineOptions) -> Mapping[str, str]:
        """A tree holds all of its parts."""
        return {}

    def request(self, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> DiffusersRequest:
        """What is asked for. Raises PlanError INVALID_OPTION."""
        image, given = workload.image, options.generic
        if given.law not in ("", LAW):
            message = f"The law {given.law[:40]!r} prices no pictures; {LAW} does."
            raise PlanError("INVALID_OPTION", "options.generic.law", message)
        named = sorted(field.name for field, _ in given.ListFields() if field.name in _OTHERS)
        if named:
            raise PlanError("INVALID_OPTION", f"options.generic.{named[0]}", f"{named[0]} is for chat models.")
        for name in ("width_px", "height_px"):
            if getattr(image, name) < 0:
                raise PlanError("INVALID_OPTION", f"workload.image.{name}", f"{name} must be a number of pixels.")
        return DiffusersRequest(
            width_px=image.width_px,
            height_px=image.height_px,
            scale=0.0 if image.width_px or image.height_px else _SCALES.get(image.quality, 0.0),
            batch=image.batch,
            frames=image.frames,
            reference_images=image.reference_images,
            source_images=image.source_images,
            prompt_tokens=image.prompt_tokens,
            offload=given.offload if given.HasField("offload") else None,
            load_dtype=given.load_dtype if given.HasField("load_dtype") else None,
            tiled_decode=given.tiled_decode if given.HasField("tiled_decode") else None,
        )

    def plan(self, model: Model, request: DiffusersRequest, capacity: Capacity) -> Plan:
        """Plans one tree. Raises PlanError."""
        stop_if_abandoned()
        return plan(model, request, capacity)

    def advise(
        self, model: Model, request: DiffusersRequest, capacity: Capacity, plan: Plan, requirement: Requirement
    ) -> tuple[str, ...]:
        """What would turn a TIGHT or WONT_RUN into RUNS: variants in the order of what they cost in speed."""
        shape = _shape(plan)
        variants: list[tuple[str, DiffusersRequest]] = []
        if not shape.tiled_decode:
            variants.append(("Decoding in tiles", replace(request, tiled_decode=True)))
        if capacity.pool is Pool.DISCRETE:
            for offload in ("model", "sequential"):
                if offload != shape.offload.value:
                    tiled = replace(request, offload=offload, tiled_decode=True)
                    variants.append((f"Offload {offload!r} with tiles", tiled))
        if shape.frames > 1:
            fewer = replace(request, frames=(shape.frames + 1) // 2, tiled_decode=True)
            variants.append((f"{(shape.frames + 1) // 2} frames, decoded in tiles", fewer))
        for what, variant in variants:
            made = self.plan(model, variant, capacity)
            if judge(made.requirement, capacity).verdict is Verdict.RUNS:
                return (f"{what} needs {format_gib(made.requirement.total.expected)} in all and runs here.",)
        weights = format_gib(plan.weight_bytes)
        return (f"The components alone are {weights} as they load: choose a quantised or a smaller model.",)

    def with_size(self, request: DiffusersRequest, width_px: int, height_px: int) -> DiffusersRequest:
        """The same request at another size."""
        return replace(request, width_px=width_px, height_px=height_px, scale=0.0)

    def size_of(self, plan: Plan) -> tuple[int, int]:
        """Width and height that were planned, in pixels."""
        shape = _shape(plan)
        return shape.width_px, shape.height_px

    def side_step(self, model: Model) -> int:
        """The multiple of pixels that sides are rounded up to."""
        return pipeline_of(known_facts(model)).side_step

    def side_range(self, model: Model) -> tuple[int, int]:
        """The smallest and the largest side, in pixels."""
        return side_range(model)

    def workload(self, plan: Plan) -> plan_pb2.Workload:
        """The workload as planned."""
        shape = _shape(plan)
        return plan_pb2.Workload(
            image=plan_pb2.ImageWorkload(
                width_px=shape.width_px,
                height_px=shape.height_px,
                batch=shape.batch,
                frames=shape.frames,
                reference_images=shape.reference_images,
                source_images=shape.source_images,
                prompt_tokens=shape.text_tokens,
            )
        )

    def options(self, plan: Plan) -> plan_pb2.EngineOptions:
        """The options as planned."""
        shape = _shape(plan)
        generic = plan_pb2.GenericOptions(law=LAW, offload=shape.offload.value, tiled_decode=shape.tiled_decode)
        # Named, it would be the autoencoder's too.
        if shape.vae_dtype == shape.load_dtype:
            generic.load_dtype = shape.load_dtype
        return plan_pb2.EngineOptions(generic=generic)

    def launch(self, plan: Plan) -> plan_pb2.Launch | None:
        """Nothing here starts it."""
        return None


def _shape(plan: Plan) -> DiffusersShape:
    assert isinstance(plan.shape, DiffusersShape)
    return plan.shape
