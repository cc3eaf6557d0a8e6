package dev.seqdedupe.client;

import com.google.protobuf.ByteString;
import com.google.protobuf.UnsafeByteOperations;
import io.seqdedupe.v1.Batch;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.BitSet;
import java.util.Map;

/** The messages of a batch while it fills. */
final class Columns {
    private final Batch.Builder batch = Batch.newBuilder()
            .addPayloadOffsets(0).addKeyOffsets(0).addPropertyOffsets(0)
            .addPropertyNameOffsets(0).addPropertyValueOffsets(0).addDeduplicationIdOffsets(0);
    private final Values payloads = new Values();
    private final Values keys = new Values();
    private final Values names = new Values();
    private final Values values = new Values();
    private final Values deduplicationIds = new Values();

    /** A column of values that may be absent, in Arrow's layout, without its offsets. */
    private static final class Values {
        private byte[] data = new byte[256];
        private int size;
        private final BitSet present = new BitSet();
        private int rows;

        int add(byte[] value) {
            if (value != null) {
                if (size + value.length > data.length) {
                    data = Arrays.copyOf(data, Math.max(2 * data.length, size + value.length));
                }
                System.arraycopy(value, 0, data, size, value.length);
                size += value.length;
                present.set(rows);
            }
            rows++;
            return size;
        }

        ByteString bytes() {
            return UnsafeByteOperations.unsafeWrap(data, 0, size);
        }

        /** Returns the bitmap of the values that exist; empty if all do. */
        ByteString validity() {
            return present.cardinality() == rows
                    ? ByteString.EMPTY
                    : UnsafeByteOperations.unsafeWrap(Arrays.copyOf(present.toByteArray(), (rows + 7) / 8));
        }
    }

    /** Adds a message, whose size was checked. */
    void add(Message message) {
        int row = payloads.rows;
        batch.addPayloadOffsets(payloads.add(message.payload()));
        // The columns that most batches omit begin with the first message that needs them.
        if (message.key() != null || keys.rows > 0) {
            while (keys.rows < row) {
                batch.addKeyOffsets(keys.add(null));
            }
            batch.addKeyOffsets(keys.add(message.key()));
        }
        if (message.eventTimeMs() != 0 || batch.getEventTimesMsCount() > 0) {
            while (batch.getEventTimesMsCount() < row) {
                batch.addEventTimesMs(0);
            }
            batch.addEventTimesMs(message.eventTimeMs());
        }
        if (message.properties().isEmpty() && names.rows == 0) {
            return;
        }
        while (batch.getPropertyOffsetsCount() <= row) {
            batch.addPropertyOffsets(0);
        }
        for (Map.Entry<String, String> property : message.properties().entrySet()) {
            batch.addPropertyNameOffsets(names.add(property.getKey().getBytes(StandardCharsets.UTF_8)));
            batch.addPropertyValueOffsets(values.add(property.getValue().getBytes(StandardCharsets.UTF_8)));
        }
        batch.addPropertyOffsets(names.rows);
    }

    void addSequenceId(long id) {
        batch.addSequenceIds(id);
    }

    void addDeduplicationId(byte[] id) {
        batch.addDeduplicationIdOffsets(deduplicationIds.add(id));
    }

    int rows() {
        return payloads.rows;
    }

    /** Returns the batch, without the columns of its producer. Call it once. */
    Batch build() {
        batch.setPayloads(payloads.bytes()).setPayloadValidity(payloads.validity());
        if (keys.rows == 0) {
            batch.clearKeyOffsets();
        } else {
            batch.setKeys(keys.bytes()).setKeyValidity(keys.validity());
        }
        if (names.rows == 0) {
            batch.clearPropertyOffsets().clearPropertyNameOffsets().clearPropertyValueOffsets();
        } else {
            batch.setPropertyNames(names.bytes()).setPropertyValues(values.bytes());
        }
        if (deduplicationIds.rows == 0) {
            batch.clearDeduplicationIdOffsets();
        } else {
            batch.setDeduplicationIds(deduplicationIds.bytes());
        }
        return batch.build();
    }
}
