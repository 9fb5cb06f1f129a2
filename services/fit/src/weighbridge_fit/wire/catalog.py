"""Entries of the catalogue as they travel."""

from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.catalog.entry import CatalogEntry, CatalogFile, PixelRange, Use
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.wire.facts import facts_message

USES = {Use.IMAGE: pb.MODEL_USE_IMAGE, Use.VIDEO: pb.MODEL_USE_VIDEO, Use.CHAT: pb.MODEL_USE_CHAT}
USES_BACK: dict[int, Use] = {number: use for use, number in USES.items()}
ENGINE_KINDS = {engine: plan_pb2.EngineKind.Value(f"ENGINE_KIND_{engine.name}") for engine in Engine}


def entry_message(entry: CatalogEntry, folder: str, on_disk: bool) -> pb.CatalogModel:
    """One entry; `folder` is where its files are, or would be. Pinned facts travel without their tensors."""
    return pb.CatalogModel(
        catalog_id=entry.catalog_id,
        display_name=entry.display_name,
        use=USES[entry.use],
        engine_kind=ENGINE_KINDS[entry.engine],
        file_bytes=entry.file_bytes,
        license=entry.license,
        files=[_file_message(file) for file in entry.files],
        facts=None if entry.facts is None else facts_message(entry.facts),
        on_disk=on_disk,
        version=entry.version,
        repository=entry.repository,
        revision=entry.revision,
        width_px=_range_message(entry.width),
        height_px=_range_message(entry.height),
        default_side_px=entry.default_side_px,
        recommended_steps=entry.recommended_steps,
        image_to_image=entry.image_to_image,
        max_context_tokens=entry.max_context_tokens,
        quantization=entry.quantization,
        parameters=entry.parameters,
        commercial_use=entry.commercial_use,
        user_entry=entry.user_entry,
        folder=folder,
        notes=(*_frames_notes(entry), *entry.notes),
    )


def _file_message(file: CatalogFile) -> pb.CatalogFile:
    return pb.CatalogFile(
        name=file.name,
        component=file.component,
        size_bytes=file.size_bytes,
        sha256=file.sha256,
        url=file.url,
        path=file.path,
    )


def _range_message(value: PixelRange | None) -> pb.PixelRange | None:
    return None if value is None else pb.PixelRange(min=value.smallest, max=value.largest)


def _frames_notes(entry: CatalogEntry) -> list[str]:
    if entry.frames is None:
        return []
    usual = f", {entry.frames.usual} unasked" if entry.frames.usual else ""
    rate = entry.frames_per_second
    at = f" at {rate.smallest} to {rate.largest} a second" if rate else ""
    return [f"It makes {entry.frames.smallest} to {entry.frames.largest} frames{at}{usual}."]
