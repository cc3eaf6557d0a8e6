package dev.seqdedupe.client;

import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.Map;
import java.util.TreeMap;

/**
 * A message to publish. The {@code with} methods return changed copies. Do not change the arrays while the message is
 * being sent.
 *
 * @param payload at most 5 MiB; null means that the message has no payload
 * @param key any bytes; null means that the message has no key
 * @param eventTimeMs the event time in milliseconds since 1970; 0 means none
 * @param properties texts by name
 */
public record Message(byte[] payload, byte[] key, long eventTimeMs, Map<String, String> properties) {
    static final int MAX_BATCH_BYTES = 8 << 20;
    static final int MAX_BATCH_ROWS = 65_536;
    static final int MAX_PAYLOAD_BYTES = 5 << 20;
    // Upper bounds of what the encoding adds.
    static final int BATCH_OVERHEAD_BYTES = 1024;
    private static final int ROW_OVERHEAD_BYTES = 48;
    private static final int PROPERTY_OVERHEAD_BYTES = 8;

    /** Makes a message. The properties are copied. */
    public Message {
        properties = properties.isEmpty() ? Map.of() : Collections.unmodifiableMap(new TreeMap<>(properties));
    }

    /** Returns a message with this payload. */
    public static Message of(byte[] payload) {
        return new Message(payload, null, 0, Map.of());
    }

    /** Returns a message whose payload is this text in UTF-8. */
    public static Message of(String payload) {
        return of(payload.getBytes(StandardCharsets.UTF_8));
    }

    /** Returns the same message with this key. */
    public Message withKey(byte[] newKey) {
        return new Message(payload, newKey, eventTimeMs, properties);
    }

    /** Returns the same message with this key in UTF-8. */
    public Message withKey(String newKey) {
        return withKey(newKey.getBytes(StandardCharsets.UTF_8));
    }

    /** Returns the same message with this event time, in milliseconds since 1970. */
    public Message withEventTimeMs(long newEventTimeMs) {
        return new Message(payload, key, newEventTimeMs, properties);
    }

    /** Returns the same message with these properties. */
    public Message withProperties(Map<String, String> newProperties) {
        return new Message(payload, key, eventTimeMs, newProperties);
    }

    /** Returns an upper bound of the encoded size. Throws MESSAGE_TOO_LARGE, BATCH_TOO_LARGE. */
    int sizeBytes() {
        if (payload != null && payload.length > MAX_PAYLOAD_BYTES) {
            throw SeqdedupeException.of("MESSAGE_TOO_LARGE", "a payload of %d bytes: at most %d are accepted",
                    payload.length, MAX_PAYLOAD_BYTES);
        }
        long size = ROW_OVERHEAD_BYTES + (payload == null ? 0 : payload.length) + (key == null ? 0 : key.length);
        for (Map.Entry<String, String> property : properties.entrySet()) {
            // A UTF-16 unit has at most three bytes in UTF-8.
            size += PROPERTY_OVERHEAD_BYTES + 3L * (property.getKey().length() + property.getValue().length());
        }
        return checkedSize(size);
    }

    /** Returns the size if a batch may have it. Throws BATCH_TOO_LARGE. */
    static int checkedSize(long size) {
        if (size + BATCH_OVERHEAD_BYTES > MAX_BATCH_BYTES) {
            throw SeqdedupeException.of("BATCH_TOO_LARGE", "a batch of up to %d bytes: at most %d are accepted",
                    size + BATCH_OVERHEAD_BYTES, MAX_BATCH_BYTES);
        }
        return (int) size;
    }
}
