package dev.seqdedupe.client;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * Publishes to a topic of deduplication IDs. It is safe for use by several threads. Messages whose calls are in progress
 * at the same time have no order.
 *
 * <p>After a broken connection or a temporary refusal, the publisher sends again. If no receipt arrives within the
 * delivery timeout, the message fails with {@link SeqdedupeException.OutcomeUnknown}; then send it again with the same
 * ID. If a message may have been stored, a final error is the cause of an OUTCOME_UNKNOWN.
 * {@link SeqdedupeException.DataLoss} means that the topic contradicts earlier receipts; it ends the publisher.
 */
public final class Publisher implements AutoCloseable {
    private static final int MAX_ID_BYTES = 255;
    private static final long MAX_PENDING_BYTES = 64 << 20;

    private final Client client;
    private final InFlight inFlight = new InFlight(Integer.MAX_VALUE, MAX_PENDING_BYTES);
    private final PublisherSession session;
    private boolean isClosed; // inFlight is its lock

    private Publisher(Builder b) {
        client = b.client;
        session = new PublisherSession(client, b.topic, inFlight);
        long deliveryTimeoutMs = b.deliveryTimeoutMs;
        client.execute(() -> session.start(true, deliveryTimeoutMs));
    }

    /** Configures and opens a {@link Publisher}. */
    public static final class Builder {
        private final Client client;
        private final String topic;
        private long deliveryTimeoutMs = Producer.DELIVERY_TIMEOUT_MS;

        Builder(Client client, String topic) {
            this.client = client;
            this.topic = topic;
        }

        /** Sets the time after which a message without a receipt fails; default two minutes. Zero means no limit. */
        public Builder deliveryTimeout(Duration time) {
            deliveryTimeoutMs = Producer.Builder.checked("deliveryTimeout", time, TimeUnit.MILLISECONDS);
            return this;
        }

        /** Opens the publisher. It connects when there is something to send. */
        public Publisher open() {
            return new Publisher(this);
        }
    }

    /** Sends a message with a new ID. It keeps that ID when it is resent. A second call sends a different message. */
    public CompletableFuture<Published> send(Message message) {
        return send(newId(), message);
    }

    /** Sends a message with this ID in UTF-8. See {@link #send(byte[], Message)}. */
    public CompletableFuture<Published> send(String deduplicationId, Message message) {
        return send(deduplicationId.getBytes(StandardCharsets.UTF_8), message);
    }

    /**
     * Sends a message with an ID of 1 to 255 bytes, and returns its receipt. It waits only for room, while 64 MiB have no
     * receipt. Errors of an invalid message are thrown, and change nothing.
     */
    public CompletableFuture<Published> send(byte[] deduplicationId, Message message) {
        return add(List.of(deduplicationId), List.of(message)).receipt(0);
    }

    /**
     * Sends at most 65,536 messages with at most 8 MiB, with one ID for each message. If an ID occurs twice, the second
     * message is a DUP of the first.
     */
    public CompletableFuture<List<Published>> sendBatch(List<byte[]> deduplicationIds, List<Message> messages) {
        return add(deduplicationIds, messages).receipts();
    }

    private Entry add(List<byte[]> ids, List<Message> messages) {
        if (messages.isEmpty() || messages.size() > Message.MAX_BATCH_ROWS || messages.size() != ids.size()) {
            throw SeqdedupeException.of("INVALID_BATCH", "a batch of %d messages and %d IDs: it should have 1 to %d",
                    messages.size(), ids.size(), Message.MAX_BATCH_ROWS);
        }
        Entry entry = new Entry();
        for (int row = 0; row < ids.size(); row++) {
            byte[] id = ids.get(row);
            if (id.length < 1 || id.length > MAX_ID_BYTES) {
                throw SeqdedupeException.of("INVALID_DEDUPLICATION_ID",
                        "the deduplication ID of row %d has %d bytes: it should have 1 to %d", row, id.length, MAX_ID_BYTES);
            }
            int size = messages.get(row).sizeBytes() + id.length;
            Message.checkedSize((long) entry.sizeBytes + size);
            entry.add(messages.get(row), size);
            entry.columns.addDeduplicationId(id);
        }
        synchronized (inFlight) {
            inFlight.awaitRoom(client);
            entry.seal(inFlight);
            session.queue(entry);
        }
        return entry;
    }

    /** Waits until all earlier messages have receipts. Throws the failure of a message. */
    public void flush() {
        client.checkMayWait();
        client.await(session.flushed());
    }

    /**
     * Flushes for at most 30 seconds, and ends the publisher. Then messages without a receipt fail with OUTCOME_UNKNOWN.
     * Throws the failure of a message.
     */
    @Override
    public void close() {
        client.checkMayWait();
        synchronized (inFlight) {
            if (isClosed) {
                return;
            }
            isClosed = true;
            inFlight.end(SeqdedupeException.of("INVALID_REQUEST", "the publisher was closed: nothing was sent"));
        }
        session.flushAndEnd("the publisher was closed");
    }

    /** Returns a UUID of version 7: the time in milliseconds, then random bits. */
    private static byte[] newId() {
        long high = System.currentTimeMillis() << 16 | 0x7000 | ThreadLocalRandom.current().nextInt(0x1000);
        long low = UUID.randomUUID().getLeastSignificantBits(); // with the variant's bits
        return ByteBuffer.allocate(16).putLong(high).putLong(low).array();
    }
}
