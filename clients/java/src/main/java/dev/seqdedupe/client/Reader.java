package dev.seqdedupe.client;

import com.google.protobuf.ByteString;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.seqdedupe.v1.Batch;
import io.seqdedupe.v1.GetLastMessageIdRequest;
import io.seqdedupe.v1.GetLastMessageIdResponse;
import io.seqdedupe.v1.ReadServiceGrpc;
import io.seqdedupe.v1.ReadStart;
import io.seqdedupe.v1.ReadStreamRequest;
import io.seqdedupe.v1.ReadStreamResponse;
import io.seqdedupe.v1.Record;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Objects;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/**
 * Reads a topic: durable messages, in order, without gaps or repetitions. After a lost connection, or while the topic
 * recovers, it waits without a time limit, and then continues. Use a reader in one thread; another thread may close it.
 *
 * <p>Without {@link Builder#follow()} and {@link Builder#stopIndex}, the reader ends after the last message that existed
 * when it connected. It throws {@link SeqdedupeException.PositionLost} if messages after its position were removed or the
 * topic was created again, {@link SeqdedupeException.NotFound}, and {@link SeqdedupeException.DataLoss} for damaged
 * messages.
 */
public final class Reader implements Iterable<ReceivedMessage>, AutoCloseable {
    private static final int MISSED_ANSWERS = 2;
    /** The streams in a row whose answers do not follow the messages read so far, before the reader gives up. */
    private static final int MAX_MISFITS = 5;
    private static final int REQUESTED_ANSWERS = 4;
    private static final long UNKNOWN = -1;

    private final Client client;
    private final String topic;
    private final Cursor cursor; // null: none
    private final boolean startsAtLatest;
    private final Route route;
    private final Backoff backoff = new Backoff();
    private final boolean stopsAtEnd;
    private final Deque<ReceivedMessage> inHand = new ArrayDeque<>();
    private final Deque<Record> records = new ArrayDeque<>();
    private final Set<Cursor.Value> inDoubt = new HashSet<>(); // moves of the cursor that may have taken effect
    private long stopIndex; // UNKNOWN: none yet
    private long nextIndex = UNKNOWN;
    private long incarnation; // 0: unknown
    private Position after; // the position before nextIndex, if it is known
    private Position position; // of the last message returned
    private Cursor.Value kept;
    private boolean knowsCursor;
    private boolean hasBegun;
    private int misfits;
    private volatile ManagedChannel channel;
    private Call<ReadStreamRequest, ReadStreamResponse> stream;
    private volatile boolean isClosed;

    private Reader(Builder b) {
        client = b.client;
        topic = b.topic;
        cursor = b.cursor;
        startsAtLatest = b.startsAtLatest;
        route = new Route(client.sidecars, topic);
        stopsAtEnd = b.stopIndex == UNKNOWN && !b.follows;
        stopIndex = b.stopIndex;
        nextIndex = b.startIndex;
        knowsCursor = b.cursor == null;
        if (b.after != null) {
            readOnAfter(b.after);
            position = b.after;
        }
        client.register(this);
    }

    /** Configures and opens a {@link Reader}. */
    public static final class Builder {
        private final Client client;
        private final String topic;
        private Position after;
        private long startIndex = UNKNOWN;
        private boolean startsAtLatest;
        private long stopIndex = UNKNOWN;
        private boolean follows;
        private Cursor cursor;

        Builder(Client client, String topic) {
            this.client = client;
            this.topic = topic;
        }

        /** Starts after this position. */
        public Builder after(Position position) {
            after = position;
            return this;
        }

        /** Starts at this index. */
        public Builder startIndex(long index) {
            startIndex = checked(index);
            return this;
        }

        /** Starts with the next message that is published. */
        public Builder latest() {
            startsAtLatest = true;
            return this;
        }

        /** Ends before this index, and waits for messages that do not exist yet. */
        public Builder stopIndex(long index) {
            stopIndex = checked(index);
            return this;
        }

        /** Never ends: waits for new messages. */
        public Builder follow() {
            follows = true;
            return this;
        }

        /** Starts after the position of a cursor, if it has one; otherwise at the other start. {@link Reader#savePosition()} moves the cursor. */
        public Builder cursor(Cursor newCursor) {
            cursor = newCursor;
            return this;
        }

        private static long checked(long index) {
            if (index < 0) {
                throw SeqdedupeException.of("INVALID_POSITION", "%d is no index: they are counted from 0", index);
            }
            return index;
        }

        /** Opens the reader. It connects when the first message is needed. */
        public Reader open() {
            if (follows && stopIndex != UNKNOWN) {
                throw SeqdedupeException.of("INVALID_REQUEST", "a reader that follows has no stop index");
            }
            if ((after != null ? 1 : 0) + (startIndex != UNKNOWN ? 1 : 0) + (startsAtLatest ? 1 : 0) > 1) {
                throw SeqdedupeException.of("INVALID_REQUEST", "a reader starts after a position, at an index or at the end, "
                        + "but two of these were given");
            }
            return new Reader(this);
        }
    }

    /** Returns the iterator over the messages that are not returned yet. All iterators of a reader are the same. */
    @Override
    public Iterator<ReceivedMessage> iterator() {
        return new Iterator<>() {
            @Override
            public boolean hasNext() {
                return !inHand.isEmpty() || fetch();
            }

            @Override
            public ReceivedMessage next() {
                if (!hasNext()) {
                    throw new NoSuchElementException();
                }
                ReceivedMessage message = inHand.remove();
                position = message.position();
                return message;
            }
        };
    }

    /**
     * Returns the position of the last message returned. Before the first message, it is the start position, or null while
     * that is unknown.
     */
    public Position position() {
        return position;
    }

    /**
     * Moves the cursor to {@link #position()}, durably. Call this when the effects of all messages returned so far are
     * complete, about once a second. Throws CURSOR_MOVED if another process has moved the cursor; after OUTCOME_UNKNOWN,
     * call it again.
     */
    public void savePosition() {
        if (cursor == null) {
            throw SeqdedupeException.of("INVALID_REQUEST", "this reader of %s has no cursor", topic);
        }
        while (position != null && knowsCursor && (kept == null || !kept.position().equals(position))) {
            Cursor.Value moved = new Cursor.Value(position, "");
            try {
                cursor.compareAndSet(kept, moved);
                kept = moved;
                inDoubt.clear();
            } catch (SeqdedupeException e) {
                if (e.is("OUTCOME_UNKNOWN")) {
                    inDoubt.add(moved);
                }
                if (!e.is("CURSOR_MOVED") || inDoubt.isEmpty()) {
                    throw e;
                }
                Cursor.Value found = cursor.read().orElse(null);
                if (!inDoubt.contains(found)) {
                    throw e;
                }
                kept = found; // an earlier move of this reader has taken effect
                inDoubt.clear();
            }
        }
    }

    /** Ends the reader. A thread that waits for a message then finds no further message. */
    @Override
    public void close() {
        isClosed = true;
        client.unregister(this);
        ManagedChannel open = channel;
        if (open != null) {
            open.shutdownNow(); // the reader's thread notices it
        }
    }

    private void readOnAfter(Position p) {
        after = p;
        incarnation = p.incarnation();
        nextIndex = p.index() + 1;
    }

    private boolean isAtStop() {
        return stopIndex != UNKNOWN && Math.max(nextIndex, 0) >= stopIndex;
    }

    /** Puts the next messages in hand. Returns whether there are any. */
    private boolean fetch() {
        client.checkMayWait();
        try {
            if (!knowsCursor) {
                kept = cursor.read().orElse(null);
                if (kept != null) {
                    readOnAfter(kept.position());
                    position = after;
                }
                knowsCursor = true;
            }
            while (!isClosed) {
                try {
                    if (!records.isEmpty()) {
                        takeInHand(records.remove());
                        return true;
                    }
                    if ((stream == null && !connect()) || !receive()) {
                        return false;
                    }
                } catch (SeqdedupeException failure) {
                    if (!isClosed) {
                        handle(failure);
                    }
                }
            }
            return false;
        } catch (InterruptedException e) {
            throw Client.interrupted("the reader can continue");
        }
    }

    private void handle(SeqdedupeException failure) throws InterruptedException {
        disconnect();
        if (failure.is("ANSWERS_INCONSISTENT")) {
            if (++misfits > MAX_MISFITS) {
                misfits = 0;
                throw failure;
            }
            Thread.sleep(backoff.nextMs());
            return;
        }
        SeqdedupeException e = route.doubted(failure);
        boolean movesOn = e.isTemporary() && route.movesOn(e);
        if (!e.isTemporary() || (e.is("NOT_A_SIDECAR") && !movesOn && !hasBegun)) {
            throw e.again();
        }
        if (!movesOn) {
            Thread.sleep(Math.max(backoff.nextMs(), e.retryDelayMs()));
        }
    }

    private void disconnect() {
        records.clear();
        stream = null;
        if (channel != null) {
            channel.shutdownNow();
            channel = null;
        }
    }

    /** Begins to read at the next index. Returns false if there is nothing to read. */
    private boolean connect() throws InterruptedException {
        if (incarnation != 0 && isAtStop()) {
            return false;
        }
        channel = client.newChannel(route.address());
        if (isClosed) {
            disconnect();
            return false;
        }
        boolean mayBeTrimmed = nextIndex == UNKNOWN && stopIndex != UNKNOWN;
        if (incarnation == 0 || mayBeTrimmed || (stopsAtEnd && !isAtStop())) {
            lookAtEnds();
        }
        if (isAtStop()) {
            disconnect();
            return false;
        }
        ReadStart.Builder start = ReadStart.newBuilder();
        if (after != null && nextIndex == after.index() + 1) {
            start.setAfter(after.toProto());
        } else if (nextIndex != UNKNOWN) {
            start.setIndex(nextIndex);
        } else {
            start.setEarliest(true);
        }
        ReadStreamRequest.Builder request = ReadStreamRequest.newBuilder().setTopic(topic).setStart(start)
                .setAliveMs(client.sidecars.isOne() ? 30_000 : 5_000);
        if (stopIndex == UNKNOWN) {
            request.setFollow(true);
        } else {
            request.setStopIndex(stopIndex);
        }
        stream = new Call<>(channel, ReadServiceGrpc.getReadStreamMethod(), route.address(), request.build());
        return true;
    }

    /** Finds the position of "latest" and the end of the topic once, so that both stay the same after a reconnect. */
    private void lookAtEnds() throws InterruptedException {
        var request = GetLastMessageIdRequest.newBuilder().setTopic(topic).build();
        var calling = new Call<>(channel, ReadServiceGrpc.getGetLastMessageIdMethod(), route.address(), request);
        GetLastMessageIdResponse answer = calling.next();
        if (answer == null || answer.getLast().getIncarnation() == 0) {
            throw SeqdedupeException.of("NOT_A_SIDECAR", "%s does not say where the topic ends", route.address());
        }
        hasBegun = true;
        Position last = Position.of(answer.getLast());
        checkIncarnation(last.incarnation());
        if (startsAtLatest && after == null) {
            readOnAfter(last);
            position = last;
        }
        if (nextIndex == UNKNOWN && stopIndex != UNKNOWN && stopIndex <= answer.getFirstIndex()) {
            nextIndex = answer.getFirstIndex(); // retention has removed everything before the stop
        }
        if (stopsAtEnd) {
            long end = last.index() + 1;
            long asked = Math.max(stopIndex, nextIndex);
            if (asked > end) {
                throw SeqdedupeException.of("POSITION_AFTER_END", "index %d is after the end of %s, whose next message gets "
                        + "index %d", asked, topic, end);
            }
            stopIndex = stopIndex == UNKNOWN ? end : stopIndex;
        }
    }

    private void checkIncarnation(long found) {
        if (incarnation != 0 && incarnation != found) {
            throw SeqdedupeException.of("POSITION_OF_ANOTHER_INCARNATION", "%s is the incarnation %d, and the position is of %d: "
                    + "the topic was deleted and created again, or the position is of another topic", topic, found, incarnation);
        }
        incarnation = found;
    }

    /** Handles the next answer. Returns false when the stream has ended at the stop index. */
    private boolean receive() throws InterruptedException {
        ReadStreamResponse answer = stream.next();
        if (answer == null) {
            if (isAtStop()) {
                disconnect();
                return false;
            }
            throw SeqdedupeException.of("UNREACHABLE", "the sidecar at %s ended the stream before its end", route.address());
        }
        if (answer.getIncarnation() == 0) {
            throw SeqdedupeException.of("NOT_A_SIDECAR", "%s answered without an incarnation", route.address());
        }
        hasBegun = true;
        if (answer.getAliveMs() > 0) {
            stream.silentMs = (long) MISSED_ANSWERS * answer.getAliveMs();
        }
        checkIncarnation(answer.getIncarnation());
        answer.getRecordsList().stream().filter(Record::hasBatch).forEach(records::add);
        if (!records.isEmpty()) {
            backoff.reset();
            route.goesWell();
        }
        return true;
    }

    private void takeInHand(Record record) {
        if (record.getIncarnation() != incarnation || (nextIndex != UNKNOWN && record.getBaseIndex() != nextIndex)) {
            throw inconsistent(record, null);
        }
        List<ReceivedMessage> messages;
        try {
            messages = messages(record);
        } catch (IndexOutOfBoundsException e) {
            throw inconsistent(record, e);
        }
        inHand.addAll(messages);
        readOnAfter(messages.get(messages.size() - 1).position());
        misfits = 0;
    }

    private SeqdedupeException inconsistent(Record record, Exception cause) {
        return SeqdedupeException.of("ANSWERS_INCONSISTENT", "%s was read up to before index %d, then came index %d with %d rows",
                topic, nextIndex, record.getBaseIndex(), record.getRows()).because(cause);
    }

    /** Decodes a record. Throws IndexOutOfBoundsException if its columns do not fit together. */
    private static List<ReceivedMessage> messages(Record r) {
        Batch b = r.getBatch();
        int rows = Objects.checkIndex(r.getRows(), Message.MAX_BATCH_ROWS + 1);
        if (rows == 0 || b.getPayloadOffsetsCount() != rows + 1) {
            throw new IndexOutOfBoundsException("rows");
        }
        List<String> names = new ArrayList<>();
        for (int k = 0; k + 1 < b.getProducerNameOffsetsCount(); k++) {
            names.add(value(b.getProducerNames(), b.getProducerNameOffsetsList(), k).toStringUtf8());
        }
        List<ReceivedMessage> messages = new ArrayList<>(rows);
        for (int row = 0, run = 0, step = 0; row < rows; row++, step++) {
            long index = r.getBaseIndex() + row;
            MessageId id = new MessageId(r.getIncarnation(), index, -1);
            if (r.getRunRowsCount() > 0) {
                if (step == r.getRunRows(run)) {
                    run++;
                    step = 0;
                }
                id = new MessageId(r.getRunLedgerIds(run), r.getRunEntryIds(run), r.getRunBatchIndexes(run)).later(step);
            }
            boolean hasKey = b.getKeyOffsetsCount() > 0 && isThere(b.getKeyValidity(), row);
            boolean hasId = b.getDeduplicationIdOffsetsCount() > 0;
            boolean hasPayload = isThere(b.getPayloadValidity(), row);
            int producer = b.getProducerIndexesCount() == 0 ? 0 : b.getProducerIndexes(row);
            messages.add(new ReceivedMessage(
                    index,
                    hasId ? "" : names.get(producer),
                    hasId ? -1 : b.getSequenceIds(row),
                    hasId ? bytes(b.getDeduplicationIds(), b.getDeduplicationIdOffsetsList(), row) : null,
                    hasPayload ? bytes(b.getPayloads(), b.getPayloadOffsetsList(), row) : null,
                    hasKey ? bytes(b.getKeys(), b.getKeyOffsetsList(), row) : null,
                    b.getEventTimesMsCount() == 0 ? 0 : b.getEventTimesMs(row),
                    r.getPublishTimeMs(),
                    properties(b, row),
                    id,
                    new Position(r.getIncarnation(), id, index, r.getOwnership())));
        }
        return messages;
    }

    private static boolean isThere(ByteString validity, int row) {
        return validity.isEmpty() || (validity.byteAt(row / 8) >> (row % 8) & 1) == 1;
    }

    private static ByteString value(ByteString data, List<Integer> offsets, int row) {
        return data.substring(offsets.get(row), offsets.get(row + 1));
    }

    private static byte[] bytes(ByteString data, List<Integer> offsets, int row) {
        return value(data, offsets, row).toByteArray();
    }

    private static Map<String, String> properties(Batch b, int row) {
        if (b.getPropertyOffsetsCount() == 0 || b.getPropertyOffsets(row) == b.getPropertyOffsets(row + 1)) {
            return Map.of();
        }
        Map<String, String> properties = new TreeMap<>();
        for (int i = b.getPropertyOffsets(row); i < b.getPropertyOffsets(row + 1); i++) {
            properties.put(value(b.getPropertyNames(), b.getPropertyNameOffsetsList(), i).toStringUtf8(),
                    value(b.getPropertyValues(), b.getPropertyValueOffsetsList(), i).toStringUtf8());
        }
        return Collections.unmodifiableMap(properties);
    }

    /** A call whose answers the reader's thread waits for. */
    private final class Call<Q, A> extends ClientCall.Listener<A> {
        private static final Object BEGIN = new Object();
        private static final Object END = new Object();
        private final BlockingQueue<Object> answers = new LinkedBlockingQueue<>();
        private final ClientCall<Q, A> call;
        private final String address;
        private final boolean isStream;
        /** A sidecar that is silent for longer is unreachable. */
        private long silentMs = Client.CALL_TIMEOUT_MS;

        Call(ManagedChannel channel, MethodDescriptor<Q, A> method, String address, Q request) {
            this.address = address;
            isStream = !method.getType().serverSendsOneMessage();
            call = channel.newCall(method, client.options());
            call.start(this, new Metadata());
            call.request(REQUESTED_ANSWERS);
            call.sendMessage(request);
            call.halfClose();
        }

        @Override
        public void onHeaders(Metadata headers) {
            answers.add(BEGIN);
        }

        @Override
        public void onMessage(A answer) {
            answers.add(answer);
        }

        @Override
        public void onClose(Status status, Metadata trailers) {
            answers.add(status.isOk() ? END : SeqdedupeException.of(status.asRuntimeException(trailers), address));
        }

        /** Returns the next answer, or null at the end of the call. Throws its error, or UNREACHABLE. */
        @SuppressWarnings("unchecked")
        A next() throws InterruptedException {
            Object answer = answers.poll(silentMs, TimeUnit.MILLISECONDS);
            if (answer == BEGIN) {
                // A sidecar that has begun may be silent for any time, unless it says that it will not.
                silentMs = isStream ? Long.MAX_VALUE : silentMs;
                return next();
            }
            if (answer == null) {
                throw SeqdedupeException.of("UNREACHABLE", "the sidecar at %s was silent for %d ms", address, silentMs);
            }
            if (answer instanceof SeqdedupeException e) {
                throw e;
            }
            call.request(1);
            return answer == END ? null : (A) answer;
        }
    }
}
