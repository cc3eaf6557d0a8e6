package dev.seqdedupe.client;

/** The sidecar's decision about a message. */
public enum Verdict {
    /** The message is new, and is now in the log. */
    NOT_DUP,
    /** The ID of the message is a copy, or is not above the highest durable ID. Nothing was appended. */
    DUP
}
