"""The gRPC server, which speaks the protocol of Danube, and the client of its own streams."""
