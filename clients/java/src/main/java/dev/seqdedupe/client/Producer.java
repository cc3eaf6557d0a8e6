package dev.seqdedupe.client;

import com.google.protobuf.ByteString;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/**
 * Publishes under a producer name. It is safe for use by several threads; then messages take their places in the topic in
 * the order of the calls.
 *
 * <p>After a broken connection or a restart of the sidecar, the producer sends messages without a receipt again, in
 * order. Each message is in the log at most once. A message with a receipt is in the log exactly once, and durable.
 *
 * <p>These errors end the producer, and all messages without a receipt fail: {@link SeqdedupeException.Fenced}, another
 * process has opened the name; {@link SeqdedupeException.DataLoss}, the sidecar has lost acknowledged messages; {@link
 * SeqdedupeException.InvalidRequest}, the sidecar refuses a batch for its content (earlier batches still get receipts);
 * {@link SeqdedupeException.OutcomeUnknown}, no receipt arrived within the delivery timeout. After the last, open the
 * producer again, and send from {@link #lastSequenceId()} + 1. After any other final error, messages that may have been
 * stored fail with OUTCOME_UNKNOWN too, and the error is its cause.
 */
public final class Producer implements AutoCloseable {
    private static final long NEXT = -1;
    private static final int MAX_NAME_BYTES = 255;
    static final long DELIVERY_TIMEOUT_MS = 120_000;

    private final Client client;
    private final String name;
    private final long lingerNanos;
    private final int maxBatchRows;
    private final int maxBatchBytes;
    private final InFlight inFlight; // also the lock of all fields below
    private final ProducerSession session;
    private Entry filling; // the batch that takes messages, if there is one
    private long lastSent = -1; // in this session
    private long lastId;
    private boolean isClosed;

    private Producer(Builder b, ByteString nameBytes) {
        client = b.client;
        client.checkMayWait();
        name = b.name;
        lingerNanos = b.lingerNanos;
        maxBatchRows = b.maxBatchRows;
        maxBatchBytes = b.maxBatchBytes;
        long deliveryTimeoutMs = b.deliveryTimeoutMs;
        inFlight = new InFlight(b.maxInFlightBatches, b.maxInFlightBytes);
        session = new ProducerSession(client, b.topic, name, nameBytes, inFlight, this::takeFilling);
        client.execute(() -> session.begin(deliveryTimeoutMs));
        try {
            lastId = client.await(session.opened);
        } catch (SeqdedupeException e) {
            session.abandon("the opening of producer " + name + " was given up");
            throw e;
        }
    }

    /** Configures and opens a {@link Producer}. */
    public static final class Builder {
        private final Client client;
        private final String topic;
        private final String name;
        private long lingerNanos = 1_000_000;
        private int maxBatchRows = 1000;
        private int maxBatchBytes = 128 << 10;
        private int maxInFlightBatches = 32;
        private long maxInFlightBytes = 16 << 20;
        private long deliveryTimeoutMs = DELIVERY_TIMEOUT_MS;

        Builder(Client client, String topic, String name) {
            this.client = client;
            this.topic = topic;
            this.name = name;
        }

        /**
         * Sets the time after which a batch that is not full is sent; default 1 ms. While nothing is in flight, a batch is
         * sent at once.
         */
        public Builder linger(Duration time) {
            lingerNanos = checked("linger", time, TimeUnit.NANOSECONDS);
            return this;
        }

        /** Sets the number of messages in a full batch; default 1,000, at most 65,536. */
        public Builder maxBatchRows(int rows) {
            maxBatchRows = checked("maxBatchRows", rows, Message.MAX_BATCH_ROWS);
            return this;
        }

        /** Sets about the size of a full batch; default 128 KiB, at most 8 MiB - 1 KiB. */
        public Builder maxBatchBytes(int bytes) {
            maxBatchBytes = checked("maxBatchBytes", bytes, Message.MAX_BATCH_BYTES - Message.BATCH_OVERHEAD_BYTES);
            return this;
        }

        /** Sets the number of batches without a receipt at which {@code send} waits; default 32. */
        public Builder maxInFlightBatches(int batches) {
            maxInFlightBatches = checked("maxInFlightBatches", batches, Integer.MAX_VALUE);
            return this;
        }

        /** Sets about the number of bytes without a receipt at which {@code send} waits; default 16 MiB. */
        public Builder maxInFlightBytes(int bytes) {
            maxInFlightBytes = checked("maxInFlightBytes", bytes, Integer.MAX_VALUE);
            return this;
        }

        /**
         * Sets the time after which a batch without a receipt ends the producer with OUTCOME_UNKNOWN; default two minutes.
         * Zero means no limit.
         */
        public Builder deliveryTimeout(Duration time) {
            deliveryTimeoutMs = checked("deliveryTimeout", time, TimeUnit.MILLISECONDS);
            return this;
        }

        /** Converts a time. A time that is too long for the unit is the longest one. */
        static long checked(String what, Duration time, TimeUnit unit) {
            if (time == null || time.isNegative()) {
                throw SeqdedupeException.of("INVALID_REQUEST", "%s is %s: it should be a time of at least 0", what, time);
            }
            return time.isZero() ? 0 : Math.max(1, unit.convert(time));
        }

        private static int checked(String what, int value, int atMost) {
            if (value < 1 || value > atMost) {
                throw SeqdedupeException.of("INVALID_REQUEST", "%s is %d: it should be 1 to %d", what, value, atMost);
            }
            return value;
        }

        /**
         * Opens the producer. It takes the name over from any other process, and waits until all messages in flight under
         * the name are settled, for at most 30 seconds.
         */
        public Producer open() {
            ByteString bytes = ByteString.copyFromUtf8(name);
            if (bytes.isEmpty() || bytes.size() > MAX_NAME_BYTES) {
                throw SeqdedupeException.of("INVALID_NAME", "the producer name %.80s should be 1 to 255 bytes", name);
            }
            return new Producer(this, bytes);
        }
    }

    /**
     * Returns the highest sequence ID that was sent. Before the first message, it is the highest durable ID of the
     * producer name, after which the source must continue; -1 if there is none.
     */
    public long lastSequenceId() {
        synchronized (inFlight) {
            return lastId;
        }
    }

    /** Queues a message with the sequence ID after {@link #lastSequenceId()}. See {@link #send(long, Message)}. */
    public CompletableFuture<Published> send(Message message) {
        return add(NEXT, message);
    }

    /**
     * Queues a message, and returns its receipt. It waits only for room, while too much is in flight.
     *
     * <p>The sequence ID must come from the source of the messages, and must rise; gaps are allowed. Errors of an invalid
     * message are thrown, and change nothing. Later errors are those of the receipt.
     */
    public CompletableFuture<Published> send(long sequenceId, Message message) {
        return add(checkedId(sequenceId), message);
    }

    private CompletableFuture<Published> add(long sequenceId, Message message) {
        int size = message.sizeBytes();
        synchronized (inFlight) {
            awaitRoom();
            long id = nextId(lastSent, sequenceId);
            if (filling != null && filling.sizeBytes + size > maxBatchBytes) {
                seal();
            }
            if (filling == null) {
                Entry entry = filling = new Entry();
                if (inFlight.isEmpty() || lingerNanos == 0) {
                    client.execute(() -> sealIfFilling(entry));
                } else {
                    client.loop.schedule(() -> sealIfFilling(entry), lingerNanos, TimeUnit.NANOSECONDS);
                }
            }
            Entry entry = filling;
            entry.columns.addSequenceId(id);
            int row = entry.add(message, size);
            sent(id);
            if (row + 1 >= maxBatchRows || entry.sizeBytes >= maxBatchBytes) {
                seal();
            }
            return entry.receipt(row);
        }
    }

    /**
     * Queues a whole batch of at most 65,536 messages and 8 MiB, after all earlier messages. It is faster than single
     * messages. The sequence IDs are as many as the messages; null numbers the messages. Otherwise it is the same as
     * {@link #send(long, Message)}.
     */
    public CompletableFuture<List<Published>> sendBatch(long[] sequenceIds, List<Message> messages) {
        int rows = messages.size();
        if (rows == 0 || rows > Message.MAX_BATCH_ROWS || (sequenceIds != null && sequenceIds.length != rows)) {
            throw SeqdedupeException.of("INVALID_BATCH", "a batch of %d messages: it should have 1 to %d, and as many IDs",
                    rows, Message.MAX_BATCH_ROWS);
        }
        Entry entry = new Entry();
        for (Message message : messages) {
            int size = message.sizeBytes();
            Message.checkedSize((long) entry.sizeBytes + size);
            entry.add(message, size);
        }
        synchronized (inFlight) {
            awaitRoom();
            long last = lastSent;
            for (int row = 0; row < rows; row++) {
                long given = sequenceIds != null ? checkedId(sequenceIds[row]) : row == 0 ? NEXT : last + 1;
                last = nextId(last, given);
                entry.columns.addSequenceId(last);
            }
            seal();
            sent(last);
            queue(entry);
            return entry.receipts();
        }
    }

    /** Waits until all earlier messages have receipts. Throws the first failure. */
    public void flush() {
        client.checkMayWait();
        synchronized (inFlight) {
            seal();
        }
        client.await(session.flushed());
    }

    /**
     * Flushes for at most 30 seconds, and ends the producer. Then messages without a receipt fail with OUTCOME_UNKNOWN.
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
            seal();
        }
        session.flushAndEnd("producer " + name + " was closed");
    }

    private void awaitRoom() {
        if (!isClosed) {
            inFlight.awaitRoom(client);
        }
        if (isClosed) {
            throw SeqdedupeException.of("INVALID_REQUEST", "producer %s was closed", name);
        }
    }

    private static long checkedId(long sequenceId) {
        if (sequenceId < 0) {
            throw SeqdedupeException.of("INVALID_SEQUENCE_ID", "%d is no sequence ID: they are 0 to 2^63 - 1", sequenceId);
        }
        return sequenceId;
    }

    private long nextId(long last, long sequenceId) {
        long id = sequenceId == NEXT ? checkedId(lastId + 1) : checkedId(sequenceId);
        if (id <= last) {
            throw SeqdedupeException.of("NOT_ASCENDING", "sequence ID %d is not above %d, which was sent before", id, last);
        }
        return id;
    }

    private void sent(long id) {
        lastSent = id;
        lastId = Math.max(lastId, id);
    }

    private void sealIfFilling(Entry entry) {
        synchronized (inFlight) {
            if (filling == entry) {
                seal();
            }
        }
    }

    private void seal() {
        Entry entry = filling;
        filling = null;
        if (entry != null) {
            queue(entry);
        }
    }

    private void queue(Entry entry) {
        entry.seal(inFlight);
        session.queue(entry);
    }

    /** Returns the batch that takes messages, sealed, which the session has not seen; null if there is none. */
    private Entry takeFilling() {
        synchronized (inFlight) {
            Entry entry = filling;
            filling = null;
            if (entry != null) {
                entry.seal(inFlight);
            }
            return entry;
        }
    }
}
