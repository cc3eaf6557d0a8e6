"""Small canonical batches for the tests of logs."""

from seqdedupe.v1 import batch_pb2

TOPIC = "persistent://public/default/t"
SECRET = bytes(range(16))


def encoded_batch(first_id: int, rows: int, payload_bytes: int = 10) -> tuple[bytes, int, int]:
    """A batch of one producer, its rows and column bytes. Payloads differ from row to row and batch to batch."""
    columns = batch_pb2.Batch(
        producer_name_offsets=[0, 1],
        producer_names=b"p",
        epochs=[1],
        previous_sequence_ids=[first_id - 1],
        sequence_ids=range(first_id, first_id + rows),
    )
    payloads = [bytes([i % 251]) * payload_bytes for i in range(first_id, first_id + rows)]
    rest = batch_pb2.Batch(payload_offsets=[payload_bytes * i for i in range(rows + 1)], payloads=b"".join(payloads))
    encoded = columns.SerializeToString()
    return encoded + rest.SerializeToString(), rows, len(encoded)
