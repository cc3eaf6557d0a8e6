package dev.seqdedupe.client;

/** Counts what a producer or publisher has in flight. Senders wait while it is full. It is its own lock. */
final class InFlight {
    private final int maxBatches;
    private final long maxBytes;
    private int batches;
    private long bytes;
    private SeqdedupeException failure;

    InFlight(int maxBatches, long maxBytes) {
        this.maxBatches = maxBatches;
        this.maxBytes = maxBytes;
    }

    /** Waits until there is room. Throws the error with which the sender has ended. */
    synchronized void awaitRoom(Client client) {
        while (failure == null && (batches >= maxBatches || bytes >= maxBytes)) {
            client.checkMayWait();
            try {
                wait();
            } catch (InterruptedException e) {
                throw Client.interrupted("nothing was sent");
            }
        }
        if (failure != null) {
            throw failure.again();
        }
    }

    synchronized boolean isEmpty() {
        return batches == 0;
    }

    synchronized void add(int size) {
        batches++;
        bytes += size;
    }

    synchronized void release(int size) {
        batches--;
        bytes -= size;
        notifyAll();
    }

    /** Lets all calls fail from now on. */
    synchronized void end(SeqdedupeException why) {
        failure = failure == null ? why : failure;
        notifyAll();
    }
}
