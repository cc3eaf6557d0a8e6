package dev.seqdedupe.client;

import io.grpc.netty.shaded.io.netty.util.concurrent.ScheduledFuture;
import io.seqdedupe.v1.Frame;
import io.seqdedupe.v1.PublishStreamResponse;
import io.seqdedupe.v1.Receipt;
import io.seqdedupe.v1.Refusal;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * What sends over a publish stream: it connects, again and again, until it ends. All methods run on the client's event
 * loop, except those that say otherwise. So nothing here needs a lock.
 */
abstract class Sender implements AutoCloseable {
    private static final long LONGEST_TICK_MS = 1000;
    private static final long CLOSE_TIMEOUT_MS = 30_000;

    final Client client;
    final String topic;
    final Route route;
    final Backoff backoff = new Backoff();
    /** Why nothing was accepted lately, for callers that give up. */
    SeqdedupeException lastError;
    /** Whether a call has failed or was refused since the last receipt. */
    boolean isInTrouble;
    private PublishStream stream; // while one serves this sender
    private boolean isResting; // it connects when there is something to send
    private boolean hasEnded;
    private ScheduledFuture<?> ticks;
    private long tickedAt;
    private long graceUntil;

    Sender(Client client, String topic) {
        this.client = client;
        this.topic = topic;
        route = new Route(client.sidecars, topic);
        graceUntil = tickedAt = System.nanoTime();
        client.register(this);
    }

    /** Prepares this sidecar before frames are sent to it. */
    abstract CompletableFuture<Void> open(String address);

    /** Whether a sidecar has ever answered. */
    abstract boolean hasBegun();

    /** Whether there is nothing to send, and nothing in flight. */
    abstract boolean isIdle();

    /** Returns the next frame to send now, or null. */
    abstract Frame nextFrame();

    /** Whether an answer counts. Otherwise its frames are sent again. */
    abstract boolean accepts(PublishStreamResponse answer);

    /** Handles the answers to its frames. If it throws an error, only this sender leaves the stream. */
    abstract void take(PublishStreamResponse answer, List<Receipt> receipts, List<Refusal> refusals);

    /** The frames in flight will get no answer. Unless the sidecar may have read them, they have stored nothing. */
    abstract void streamEnded(boolean mayHaveReadFrames);

    /** Returns the error for the caller, instead of an error that no other attempt cures. Null: connect again. */
    abstract SeqdedupeException converted(SeqdedupeException e);

    /** Ends everything in flight with this error. Without `isFinal`, later messages are tried again. */
    abstract void fail(SeqdedupeException why, boolean isFinal);

    /** Gives up what was queued before this time, by the system's nanoseconds. */
    abstract void expire(long before);

    /** Ends the sender. Returns the error with which it has ended. */
    abstract SeqdedupeException abort(String what);

    /** Queues a sealed batch. */
    abstract void add(Entry entry);

    /** Returns a future of the receipts of all batches so far. */
    abstract CompletableFuture<Void> settled();

    @Override
    public void close() {
        end();
    }

    // -- For any thread.

    /** Hands a sealed batch to the event loop. If the client was closed, the batch fails, and this method throws. */
    final void queue(Entry entry) {
        try {
            client.execute(() -> add(entry));
        } catch (SeqdedupeException e) {
            entry.end(e);
            throw e;
        }
    }

    /** Returns a future that is done when all batches queued so far have receipts. */
    final CompletableFuture<Void> flushed() {
        // In a later task of the event loop, the futures that depend on the batches are complete too.
        return CompletableFuture.supplyAsync(this::settled, client::execute).thenCompose(settled -> settled)
                .whenCompleteAsync((nothing, failure) -> {}, client::execute);
    }

    /** Waits for at most 30 seconds for the receipts, and ends the sender. Throws the failure of a message. */
    final void flushAndEnd(String what) {
        CompletableFuture<Void> flushed = flushed().orTimeout(CLOSE_TIMEOUT_MS, TimeUnit.MILLISECONDS);
        CompletableFuture<Void> ended = flushed.handle((nothing, failure) -> failure).thenAcceptAsync(failure -> {
            SeqdedupeException late = abort(what);
            if (failure != null) {
                boolean isLate = failure instanceof TimeoutException || failure.getCause() instanceof TimeoutException;
                throw isLate ? late : SeqdedupeException.of(failure, topic);
            }
        }, client::execute);
        client.await(ended);
    }

    /** Ends the sender without waiting. */
    final void abandon(String what) {
        try {
            client.execute(() -> abort(what));
        } catch (SeqdedupeException e) {
            // the end of the client has ended the sender
        }
    }

    // -- On the event loop.

    final void start(boolean rests, long deliveryTimeoutMs) {
        isResting = rests;
        if (deliveryTimeoutMs > 0) {
            long tickMs = Math.max(1, Math.min(deliveryTimeoutMs / 10, LONGEST_TICK_MS));
            ticks = client.loop.scheduleWithFixedDelay(
                    () -> tick(tickMs, deliveryTimeoutMs), tickMs, tickMs, TimeUnit.MILLISECONDS);
        }
        if (!rests) {
            connect();
        }
    }

    private void tick(long tickMs, long timeoutMs) {
        long now = System.nanoTime();
        long lateNanos = now - tickedAt - TimeUnit.MILLISECONDS.toNanos(tickMs);
        tickedAt = now;
        if (lateNanos > TimeUnit.SECONDS.toNanos(1)) {
            // While this process was stopped, it could receive nothing.
            graceUntil = now + Math.min(lateNanos, TimeUnit.MILLISECONDS.toNanos(timeoutMs));
        }
        if (now - graceUntil >= 0) {
            expire(now - TimeUnit.MILLISECONDS.toNanos(timeoutMs));
        }
    }

    /** Tells the stream that there is something to send. */
    final void wake() {
        if (stream != null) {
            stream.ready(this);
        } else if (isResting && !hasEnded) {
            isResting = false;
            connect();
        }
    }

    private void connect() {
        if (hasEnded) {
            return;
        }
        String address = route.address();
        try {
            open(address).whenComplete((opened, failure) -> {
                try {
                    if (failure != null) {
                        lost(SeqdedupeException.of(failure, address));
                    } else if (!hasEnded) {
                        stream = client.join(address, this);
                        stream.ready(this);
                    }
                } catch (RuntimeException e) {
                    lost(SeqdedupeException.of(e, address));
                }
            });
        } catch (RuntimeException e) {
            lost(SeqdedupeException.of(e, address));
        }
    }

    /** Handles the end of an attempt or of a stream. */
    final void lost(SeqdedupeException why) {
        lost(why, true);
    }

    /** Handles the end of an attempt, or of a stream that the sidecar may have refused. */
    final void lost(SeqdedupeException why, boolean mayHaveReadFrames) {
        stream = null;
        if (hasEnded) {
            return;
        }
        streamEnded(mayHaveReadFrames);
        isInTrouble = true;
        SeqdedupeException e = route.doubted(why);
        if (!e.isTemporary()) {
            SeqdedupeException last = converted(e);
            if (last != null) {
                fail(last, true);
                end();
            } else {
                client.loop.execute(this::connect);
            }
            return;
        }
        if (e.is("STREAM_IDLE") && isIdle()) {
            isResting = true;
            return;
        }
        boolean movesOn = route.movesOn(e);
        lastError = e;
        if (e.is("NOT_A_SIDECAR") && !movesOn && !hasBegun()) {
            fail(e, false);
            isResting = true;
        } else if (movesOn) {
            client.loop.execute(this::connect);
        } else {
            client.loop.schedule(this::connect, Math.max(backoff.nextMs(), e.retryDelayMs()), TimeUnit.MILLISECONDS);
        }
    }

    /** Records that a receipt has arrived. */
    void goesWell() {
        if (isInTrouble) {
            isInTrouble = false;
            lastError = null;
            backoff.reset();
            route.goesWell();
        }
    }

    /** Leaves the stream, and does not connect again. */
    final void end() {
        hasEnded = true;
        client.unregister(this);
        if (ticks != null) {
            ticks.cancel(false);
        }
        if (stream != null) {
            stream.leave(this);
            stream = null;
        }
    }
}
