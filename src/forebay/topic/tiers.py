"""What all topics of a store share beyond the local disk: catalog, lease, objects, threads."""

from __future__ import annotations

from pathlib import Path

from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.catalog.ownership import Session
from forebay.clock import Clock
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.objects.buffers import return_large_blocks
from forebay.objects.store import CloudStore, connect
from forebay.read.fetch import FetchPool
from forebay.read.joined import CatalogSource, LocalEnd, TieredLog
from forebay.read.verify import looks_same, verify_object
from forebay.settings import StoreSettings
from forebay.upload.engine import UploadPorts


class Tiers:
    """The catalog and the objects, as a store is configured. Opens nothing twice."""

    def __init__(
        self,
        settings: StoreSettings,
        clock: Clock,
        *,
        catalog: Catalog | None = None,
        store: CloudStore | None = None,
    ) -> None:
        data = None if settings.data is None else Path(settings.data)
        prefix = settings.metadata.prefix or settings.uploader.root_prefix
        return_large_blocks()
        self.settings = settings
        self.clock = clock
        self.catalog = catalog or Catalog(connect_kv(settings.metadata, data), prefix, clock)
        try:
            self.store = store or connect(settings.cloud, data)
        except BaseException:
            if catalog is None:
                self.catalog.close()
            raise
        self._owned = [each for each, given in ((self.catalog, catalog),) if given is None]
        self._own_store = store is None
        self.pool = FetchPool(settings.cloud_reader.fetch_threads)
        self.session = Session(self.catalog, settings.metadata, clock)
        self.upload_ports = UploadPorts(self.store, settings.uploader, self._verify, clock)

    def _verify(self, topic: TopicName, descriptor: ObjectDescriptor) -> None:
        """After an upload: reads the object back, or looks at it, as configured."""
        if self.settings.uploader.verify_after_upload:
            self.read_back(topic, descriptor)
        else:
            self.require_there(topic, descriptor)

    def require_there(self, topic: TopicName, descriptor: ObjectDescriptor) -> None:
        """Before a segment goes: raises unless its object is there, and as it was."""
        if not looks_same(self.store, topic, descriptor):
            self.read_back(topic, descriptor)

    def read_back(self, topic: TopicName, descriptor: ObjectDescriptor) -> None:
        """Raises unless the object holds exactly the frames that its descriptor says."""
        verify_object(self.store, self.pool, self.settings.cloud_reader, topic, descriptor)

    def joined(self, topic: TopicName, log: LocalEnd) -> TieredLog:
        """One log over the objects and `log`."""
        return TieredLog(
            topic,
            log,
            CatalogSource(self.catalog, topic),
            self.store,
            self.pool,
            self.settings.cloud_reader,
        )

    def close(self) -> None:
        """Ends the lease; every topic must be closed before."""
        self.session.close()
        self.pool.close()
        if self._own_store:
            self.store.close()
        for catalog in self._owned:
            catalog.close()
