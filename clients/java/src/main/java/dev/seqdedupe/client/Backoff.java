package dev.seqdedupe.client;

import java.util.concurrent.ThreadLocalRandom;

/** Pauses that double, each shortened at random by up to a half. */
final class Backoff {
    private static final long FIRST_MS = 20;
    private static final long LONGEST_MS = 2000;
    private long nextMs = FIRST_MS;

    long nextMs() {
        long delay = nextMs;
        nextMs = Math.min(2 * delay, LONGEST_MS);
        return ThreadLocalRandom.current().nextLong(delay / 2, delay + 1);
    }

    void reset() {
        nextMs = FIRST_MS;
    }
}
