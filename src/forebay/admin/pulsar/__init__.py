"""Pulsar's REST API for tiered storage, below `/admin/v2`, so that `pulsar-admin` works.

`paths` maps the names, `policies` has the policies of namespaces and topics, `offload` starts
offloads, tells how they go, and shows the ledgers, and `scan` compares a bucket with the catalog.
"""
