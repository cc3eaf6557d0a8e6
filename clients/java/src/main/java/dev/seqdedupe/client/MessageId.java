package dev.seqdedupe.client;

/**
 * The place of a message in its log.
 *
 * @param ledgerId the ledger; in the embedded log, the incarnation of the topic
 * @param entryId the entry in the ledger; in the embedded log, the index of the message
 * @param batchIndex the place within an entry of several messages; -1 if the entry is one message
 */
public record MessageId(long ledgerId, long entryId, int batchIndex) {
    static MessageId of(io.seqdedupe.v1.MessageId m) {
        return new MessageId(m.getLedgerId(), m.getEntryId(), m.getBatchIndex());
    }

    io.seqdedupe.v1.MessageId toProto() {
        return io.seqdedupe.v1.MessageId.newBuilder()
                .setLedgerId(ledgerId).setEntryId(entryId).setBatchIndex(batchIndex).build();
    }

    /** Returns the ID of the message that is this number of messages later in the same run. */
    MessageId later(int rows) {
        return batchIndex < 0
                ? new MessageId(ledgerId, entryId + rows, batchIndex)
                : new MessageId(ledgerId, entryId, batchIndex + rows);
    }

    /** Returns {@code ledger:entry} or {@code ledger:entry:batchIndex}. */
    @Override
    public String toString() {
        return ledgerId + ":" + entryId + (batchIndex < 0 ? "" : ":" + batchIndex);
    }
}
