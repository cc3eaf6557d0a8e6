package dev.seqdedupe.client;

import java.util.Map;

/**
 * A message that a reader has read.
 *
 * @param index the index in the topic
 * @param producerName the name of the producer; empty in a topic of deduplication IDs
 * @param sequenceId the sequence ID; -1 in a topic of deduplication IDs
 * @param deduplicationId the deduplication ID; null in a topic of sequence IDs
 * @param payload the payload, or null
 * @param key the key, or null
 * @param eventTimeMs the event time in milliseconds since 1970; 0 means none
 * @param publishTimeMs when the sidecar took the message, in milliseconds since 1970
 * @param properties texts by name
 * @param messageId the place in the log
 * @param position the position after this message, from which a reader can continue
 */
public record ReceivedMessage(
        long index,
        String producerName,
        long sequenceId,
        byte[] deduplicationId,
        byte[] payload,
        byte[] key,
        long eventTimeMs,
        long publishTimeMs,
        Map<String, String> properties,
        MessageId messageId,
        Position position) {}
