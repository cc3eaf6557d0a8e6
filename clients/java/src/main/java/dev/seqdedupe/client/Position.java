package dev.seqdedupe.client;

import com.google.protobuf.InvalidProtocolBufferException;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * The place of a reader: after the message with this index, in this incarnation of its topic. Store it in the same
 * transaction as the effects of the messages, as text or as bytes. Positions of two incarnations have no order.
 *
 * @param incarnation identifies the topic, also against a later topic of the same name
 * @param messageId the ID of the message; null if unknown, or at the start of the topic
 * @param index the index of the message; -1 at the start of the topic
 * @param ownership identifies the history of the topic; 0 if unknown, or at the start of the topic
 */
public record Position(long incarnation, MessageId messageId, long index, long ownership) {
    private static final String NUMBER = "\\d{1,19}";
    private static final Pattern TEXT = Pattern.compile(
            "(N)(?:/(?:(start)|(N):(N)(?::(N))?))?@(-1|N)(?:#([0-9a-f]{16}))?".replace("N", NUMBER));

    /**
     * Returns the position whose text {@link #toString()} has returned. All clients use the same text. Throws
     * INVALID_POSITION.
     */
    public static Position parse(String text) {
        Matcher m = TEXT.matcher(text);
        if (m.matches()) {
            try {
                MessageId id = m.group(3) == null ? null : new MessageId(Long.parseLong(m.group(3)),
                        Long.parseLong(m.group(4)), m.group(5) == null ? -1 : Integer.parseInt(m.group(5)));
                long ownership = m.group(7) == null ? 0 : Long.parseUnsignedLong(m.group(7), 16);
                Position p = new Position(Long.parseLong(m.group(1)), id, Long.parseLong(m.group(6)), ownership);
                if (p.isWhole() && (m.group(2) != null) == (p.index < 0)) {
                    return p;
                }
            } catch (NumberFormatException e) {
                // a number that is too large
            }
        }
        throw SeqdedupeException.of("INVALID_POSITION", "%.80s is not a position, such as 123/123:45@45", text);
    }

    /** Returns the position whose bytes {@link #toBytes()} has returned. Throws INVALID_POSITION. */
    public static Position fromBytes(byte[] data) {
        try {
            Position p = of(io.seqdedupe.v1.Position.parseFrom(data));
            if (p.incarnation != 0 && p.isWhole()) {
                return p;
            }
            throw SeqdedupeException.of("INVALID_POSITION", "these bytes are not a position");
        } catch (InvalidProtocolBufferException e) {
            throw SeqdedupeException.of("INVALID_POSITION", "these bytes are not a position").because(e);
        }
    }

    /** Returns the encoded protobuf message {@code seqdedupe.v1.Position}. */
    public byte[] toBytes() {
        return toProto().toByteArray();
    }

    /** Returns the text that {@link #parse} reads. */
    @Override
    public String toString() {
        String last = index < 0 ? "/start" : messageId == null ? "" : "/" + messageId;
        return incarnation + last + "@" + index + (ownership == 0 ? "" : String.format("#%016x", ownership));
    }

    /** Whether the parts fit together: only a position after a message has a message ID and an ownership. */
    boolean isWhole() {
        return incarnation >= 0 && (index >= 0 || (index == -1 && messageId == null && ownership == 0));
    }

    static Position of(io.seqdedupe.v1.Position p) {
        MessageId id = p.hasMessageId() ? MessageId.of(p.getMessageId()) : null;
        return new Position(p.getIncarnation(), id, p.getIndex(), p.getOwnership());
    }

    io.seqdedupe.v1.Position toProto() {
        var p = io.seqdedupe.v1.Position.newBuilder()
                .setIncarnation(incarnation).setIndex(index).setOwnership(ownership);
        return (messageId == null ? p : p.setMessageId(messageId.toProto())).build();
    }
}
