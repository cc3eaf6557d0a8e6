package dev.seqdedupe.client;

/**
 * The outcome of a message. The message is durable.
 *
 * @param verdict whether the message is new
 * @param sequenceId the sequence ID of the message; -1 for a message with a deduplication ID
 * @param index the index of the message in the topic, or with DUP of the original; -1 if the sidecar no longer knows
 *     the original, and then the log may lack a message with exactly this ID
 * @param messageId the ID of the message with this index; null if the index is -1
 * @param isImported whether the deduplication ID was part of an imported window, so that there is no index
 */
public record Published(Verdict verdict, long sequenceId, long index, MessageId messageId, boolean isImported) {}
