"""The rule and the state it stands on: pure, without I/O, clock, asyncio or gRPC."""
