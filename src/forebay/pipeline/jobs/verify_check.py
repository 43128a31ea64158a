"""What an executor does with one object: reads all of it, and its sidecar."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay.errors import (
    DescriptorError,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import TopicName, object_key, sidecar
from forebay.limits import DESCRIPTOR_BYTES_MAX
from forebay.objects.store import CloudStore
from forebay.pipeline.jobs.verify_report import NOTE, WARNING
from forebay.pipeline.resources import executor_resources
from forebay.read.verify import Examined, examine_object
from forebay.settings import StoreSettings


@dataclass(frozen=True, slots=True)
class Item:
    topic: TopicName
    descriptor: ObjectDescriptor


@dataclass(frozen=True, slots=True)
class Checked:
    examined: Examined
    sidecar: tuple[str, str] | None
    """Severity and words, if something is wrong with the sidecar."""


def check(settings: StoreSettings, item: Item) -> Checked:
    """ServiceError if the store does not answer; everything else is an answer."""
    bench = executor_resources(settings)
    examined = examine_object(
        bench.store, bench.pool, settings.cloud_reader, item.topic, item.descriptor
    )
    beside = None
    if settings.uploader.sidecars and examined.fault is None:
        beside = _check_sidecar(bench.store, item)
    return Checked(examined, beside)


def _check_sidecar(store: CloudStore, item: Item) -> tuple[str, str] | None:
    key = object_key(item.topic, sidecar(item.descriptor.object_id))
    try:
        found = decode_descriptor(bytes(store.get(key, DESCRIPTOR_BYTES_MAX)))
    except ObjectMissing:
        return WARNING, "it has no sidecar: a restore from the bucket alone would read it in full"
    except DescriptorError as error:
        return WARNING, f"its sidecar is no descriptor: {error}"
    except (ServiceUnavailable, ServiceRefused):
        raise
    except ServiceError as error:
        return WARNING, f"its sidecar cannot be read: {error}"
    said = item.descriptor
    if found == said:
        return None
    if replace(found, etag=said.etag, created_at=said.created_at) == said:
        return NOTE, "its sidecar has another etag or time than its descriptor"
    return WARNING, "its sidecar says something else than its descriptor"
