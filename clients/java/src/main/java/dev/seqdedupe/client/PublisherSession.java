package dev.seqdedupe.client;

import io.seqdedupe.v1.Frame;
import io.seqdedupe.v1.PublishStreamResponse;
import io.seqdedupe.v1.Receipt;
import io.seqdedupe.v1.Refusal;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;

/**
 * The batches of a publisher that wait for receipts, on the client's event loop. It has no session with the sidecar. It
 * detects from the receipts that a topic was replaced (duty 11 in publish.proto).
 */
final class PublisherSession extends Sender {
    /** The runs of indexes that are remembered; of more runs, the lowest is dropped. */
    private static final int MAX_RUNS = 4096;

    private final InFlight inFlight;
    private final Deque<Entry> ready = new ArrayDeque<>();
    private final Map<Long, Entry> out = new LinkedHashMap<>(); // by frame
    private final TreeMap<Long, Long> runs = new TreeMap<>(); // of new messages: the first index, and the next
    private SeqdedupeException failure;
    private long delayUntil = System.nanoTime();
    private boolean hasBegun;
    private boolean hasReceipts;
    private long incarnation;
    private long term;
    private long durableIndex;
    private long floor; // the durable index when the stream began

    PublisherSession(Client client, String topic, InFlight inFlight) {
        super(client, topic);
        this.inFlight = inFlight;
    }

    @Override
    void add(Entry entry) {
        if (failure != null) {
            entry.end(failure);
            return;
        }
        entry.queuedAt = System.nanoTime();
        ready.add(entry);
        wake();
    }

    @Override
    CompletableFuture<Void> settled() {
        return failure != null
                ? CompletableFuture.failedFuture(failure)
                : CompletableFuture.allOf(Stream.concat(out.values().stream(), ready.stream())
                        .map(entry -> entry.done).toArray(CompletableFuture[]::new));
    }

    @Override
    CompletableFuture<Void> open(String address) {
        floor = durableIndex;
        return CompletableFuture.completedFuture(null);
    }

    @Override
    boolean hasBegun() {
        return hasBegun;
    }

    @Override
    boolean isIdle() {
        return ready.isEmpty() && out.isEmpty();
    }

    @Override
    Frame nextFrame() {
        if (System.nanoTime() - delayUntil < 0) {
            return null; // `again` has scheduled the next attempt
        }
        Entry entry;
        do {
            entry = ready.poll();
        } while (entry != null && entry.isSettled());
        if (entry == null) {
            return null;
        }
        long number = Entry.FRAME_NUMBERS.incrementAndGet();
        out.put(number, entry);
        entry.openFrames++;
        return Frame.newBuilder().setNumber(number).setBatch(entry.batch).build();
    }

    @Override
    boolean accepts(PublishStreamResponse answer) {
        return true;
    }

    @Override
    void take(PublishStreamResponse answer, List<Receipt> receipts, List<Refusal> refusals) {
        hasBegun = true;
        if (!receipts.isEmpty()) {
            checkHistory(answer, receipts);
        }
        for (Receipt receipt : receipts) {
            Entry entry = out.remove(receipt.getFrame());
            goesWell();
            if (entry.isSettled()) {
                continue; // given up meanwhile
            }
            if (entry.record(receipt)) {
                entry.end(null);
            } else {
                again(entry, backoff.nextMs()); // copies of some messages are in flight
            }
        }
        SeqdedupeException elsewhere = null;
        for (Refusal refusal : refusals) {
            SeqdedupeException why = route.believed(SeqdedupeException.of(refusal), answer.getTerm(), term);
            Entry entry = out.remove(refusal.getFrame());
            entry.refused(why);
            if (entry.isSettled()) {
                continue; // given up meanwhile
            }
            if (!why.isTemporary()) {
                entry.giveUp(why);
            } else if (Route.passes(why) || route.hasLasted(why)) {
                again(entry, 0);
                elsewhere = why;
            } else {
                lastError = why;
                again(entry, Math.max(backoff.nextMs(), why.retryDelayMs()));
            }
        }
        if (elsewhere != null) {
            throw elsewhere;
        }
    }

    private void again(Entry entry, long delayMs) {
        isInTrouble = true;
        delayUntil = Math.max(delayUntil, System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(delayMs));
        ready.add(entry);
        client.loop.schedule(this::wake, delayMs + 1, TimeUnit.MILLISECONDS);
    }

    private void checkHistory(PublishStreamResponse answer, List<Receipt> receipts) {
        if (route.checkTerm(answer.getTerm(), term)) {
            throw SeqdedupeException.of("DATA_LOSS", "the sidecar answers with an older state than before: term %d (%d before)",
                    answer.getTerm(), term);
        }
        if (hasReceipts && answer.getIncarnation() != incarnation) {
            throw SeqdedupeException.of("DATA_LOSS", "the topic was created again: its incarnation is %d, and was %d before",
                    answer.getIncarnation(), incarnation);
        }
        if (answer.getDurableIndex() > 0 && answer.getDurableIndex() < floor) {
            throw SeqdedupeException.of("DATA_LOSS", "the topic ends before index %d, and was durable up to %d before",
                    answer.getDurableIndex(), floor);
        }
        hasReceipts = true;
        incarnation = answer.getIncarnation();
        term = answer.getTerm();
        durableIndex = Math.max(durableIndex, answer.getDurableIndex());
        for (Receipt receipt : receipts) {
            Entry entry = out.get(receipt.getFrame());
            if (entry == null || !entry.fits(receipt)) {
                throw SeqdedupeException.of("NOT_A_SIDECAR", "a receipt does not fit its frame");
            }
            int stored = entry.stored(receipt);
            if (stored > 0) {
                given(receipt.getFirstIndex(), receipt.getFirstIndex() + stored);
            }
        }
    }

    /** Records that new messages have these indexes. Throws DATA_LOSS if another message had one before. */
    private void given(long first, long next) {
        Map.Entry<Long, Long> before = runs.lowerEntry(next);
        if (before != null && before.getValue() > first) {
            throw SeqdedupeException.of("DATA_LOSS", "index %d was given to another message before",
                    Math.max(first, before.getKey()));
        }
        durableIndex = Math.max(durableIndex, next);
        Long after = runs.remove(next);
        long begin = before != null && before.getValue() == first ? before.getKey() : first;
        runs.put(begin, after == null ? next : after);
        if (runs.size() > MAX_RUNS) {
            runs.pollFirstEntry();
        }
    }

    @Override
    void streamEnded(boolean mayHaveReadFrames) {
        List<Entry> unanswered = new ArrayList<>(out.values());
        if (!mayHaveReadFrames) {
            unanswered.forEach(entry -> entry.openFrames--);
        }
        Collections.reverse(unanswered);
        unanswered.forEach(ready::addFirst);
        out.clear();
    }

    @Override
    SeqdedupeException converted(SeqdedupeException e) {
        return e.is("TOPIC_NOT_FOUND") && hasReceipts
                ? SeqdedupeException.of("DATA_LOSS", "the sidecar does not know the topic of earlier receipts: %s", e.getMessage())
                : e;
    }

    @Override
    void fail(SeqdedupeException why, boolean isFinal) {
        if (isFinal && failure == null) {
            failure = why;
            inFlight.end(why);
        }
        List<Entry> all = new ArrayList<>(out.values());
        all.addAll(ready);
        out.clear();
        ready.clear();
        all.stream().filter(entry -> !entry.isSettled()).forEach(entry -> entry.giveUp(why));
    }

    @Override
    void expire(long before) {
        List<Entry> all = new ArrayList<>(out.values());
        all.addAll(ready);
        for (Entry entry : all) {
            if (!entry.isSettled() && entry.queuedAt - before <= 0) {
                String because = lastError == null ? "" : ": " + lastError.getMessage();
                entry.end(SeqdedupeException.of("OUTCOME_UNKNOWN", "no receipt arrived within the delivery timeout%s",
                        because).because(lastError));
            }
        }
        ready.removeIf(Entry::isSettled);
    }

    @Override
    SeqdedupeException abort(String what) {
        fail(SeqdedupeException.of("OUTCOME_UNKNOWN", "%s", what), true);
        end();
        return failure;
    }
}
