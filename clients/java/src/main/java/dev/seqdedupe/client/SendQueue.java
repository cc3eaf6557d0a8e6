package dev.seqdedupe.client;

import com.google.protobuf.ByteString;
import io.seqdedupe.v1.Frame;
import io.seqdedupe.v1.OpenResponse;
import io.seqdedupe.v1.Receipt;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * The batches of a producer that wait for receipts, oldest first. The queue fulfils the duties of a client
 * (publish.proto) without any I/O. It always sends a batch again as a whole: rows that have a receipt are then answered
 * DUP, which changes nothing.
 *
 * <p>After a refusal or an UNKNOWN, the queue sends nothing ({@link #mustRewind}) until all frames in flight have been
 * answered. After the delay, {@link #rewind} starts again with the oldest batch without a receipt.
 */
final class SendQueue {
    private final ByteString name;
    private final InFlight inFlight;
    private final List<Entry> entries = new ArrayList<>();
    private final Map<Long, Entry> unanswered = new HashMap<>();
    private int sent; // the entries from the front that were sent since the last rewind
    private long incarnation;
    private long epoch;
    private long lastQueued = -1;
    private long highestSent = -1;
    private long highestReceipt = -1;
    private long settledUpTo = -1;

    boolean isOpen;
    boolean mustRewind;
    long retryDelayMs; // with mustRewind: the longest delay that a refusal asked for
    long term; // the highest term of any answer
    long durableIndex; // the highest of any answer: below it, the topic's log is durable
    long opened = -1; // the persisted ID in the last answer to Open
    SeqdedupeException lastRefusal; // why nothing has become durable lately
    SeqdedupeException failure; // after it, the queue accepts no more batches

    SendQueue(ByteString name, InFlight inFlight) {
        this.name = name;
        this.inFlight = inFlight;
    }

    boolean isEmpty() {
        return entries.isEmpty();
    }

    boolean hasUnanswered() {
        return !unanswered.isEmpty();
    }

    List<Entry> entries() {
        return entries;
    }

    long epoch() {
        return epoch;
    }

    /** Returns the ID up to which everything sent is durable. */
    long durableSequenceId() {
        return Math.max(opened, settledUpTo);
    }

    /** Queues a sealed batch, whose IDs are above those of all earlier batches. */
    void add(Entry entry) {
        if (failure != null) {
            entry.end(failure);
            return;
        }
        link(entry);
        entries.add(entry);
        entry.queuedAt = System.nanoTime();
    }

    private void link(Entry entry) {
        boolean isOpenedNearer = lastQueued < opened && opened < entry.firstSequenceId();
        entry.link = isOpenedNearer ? opened : lastQueued;
        lastQueued = entry.ids.get(entry.rows - 1);
    }

    /** The sidecar has read no frame of the stream, so no frame in flight has stored anything. */
    void nothingArrived() {
        unanswered.values().forEach(entry -> entry.openFrames--);
        unanswered.clear();
    }

    /**
     * Handles an answer to Open. Frames of the old stream are no longer in flight. Returns whether the topic has forgotten
     * messages of this producer. Throws DATA_LOSS, FENCED.
     */
    boolean open(OpenResponse answer) {
        long persisted = answer.getPersisted(0);
        boolean hasForgotten = answer.getForgottenCount() > 0 && Math.max(opened, highestReceipt) > persisted;
        if (hasForgotten) {
            opened = persisted;
            highestReceipt = -1;
            lastQueued = -1;
            entries.stream().filter(entry -> !entry.isSettled()).forEach(this::link);
        }
        if (isOpen) {
            checkResumed(answer, persisted);
        }
        durableIndex = Math.max(durableIndex, answer.getDurableIndex());
        isOpen = true;
        incarnation = answer.getIncarnation();
        term = answer.getTerm();
        epoch = answer.getEpochs(0);
        opened = persisted;
        unanswered.clear();
        rewind();
        return hasForgotten;
    }

    private void checkResumed(OpenResponse answer, long persisted) {
        long floor = Math.max(opened, highestReceipt);
        long newIncarnation = answer.getIncarnation();
        long newTerm = answer.getTerm();
        // If the topic has forgotten the name, only this index shows that messages with receipts are gone. Earlier
        // versions omit it.
        long newDurable = answer.hasDurableIndex() ? answer.getDurableIndex() : durableIndex;
        if (newIncarnation != incarnation || newTerm < term || persisted < floor || newDurable < durableIndex) {
            throw SeqdedupeException.of("DATA_LOSS", "the sidecar answers with an older state than before, or with the state "
                            + "of another topic: persisted sequence ID %d (at least %d before), term %d (%d before), "
                            + "incarnation %d (%d before), durable index %d (%d before)",
                    persisted, floor, newTerm, term, newIncarnation, incarnation, newDurable, durableIndex);
        }
        long known = Math.max(opened, highestSent);
        if (persisted > known) {
            throw SeqdedupeException.of("FENCED", "another process has published under this name: sequence ID %d is "
                    + "persisted, and this process has sent none above %d", persisted, known);
        }
    }

    /** Throws DATA_LOSS if an answer is of another incarnation. */
    void check(long answered) {
        if (answered != incarnation) {
            throw SeqdedupeException.of("DATA_LOSS", "the topic was created again: its incarnation is %d, and was %d before",
                    answered, incarnation);
        }
    }

    /** Returns the next frame to send, or null. */
    Frame nextFrame() {
        while (!mustRewind && sent < entries.size()) {
            Entry entry = entries.get(sent++);
            if (entry.isSettled()) {
                continue;
            }
            long number = Entry.FRAME_NUMBERS.incrementAndGet();
            unanswered.put(number, entry);
            entry.openFrames++;
            highestSent = Math.max(highestSent, entry.ids.get(entry.rows - 1));
            return Frame.newBuilder().setNumber(number).setBatch(entry.batch.toBuilder()
                    .addProducerNameOffsets(0).addProducerNameOffsets(name.size()).setProducerNames(name)
                    .addEpochs(epoch).addPreviousSequenceIds(entry.link)).build();
        }
        return null;
    }

    /** Sends again from the oldest batch without a receipt. */
    void rewind() {
        sent = 0;
        mustRewind = false;
        retryDelayMs = 0;
    }

    /** Handles a receipt. Returns whether a batch is settled. Throws NOT_A_SIDECAR. */
    boolean receipt(Receipt r) {
        Entry entry = unanswered.get(r.getFrame());
        if (entry == null) {
            return false;
        }
        if (!entry.fits(r)) {
            throw SeqdedupeException.of("NOT_A_SIDECAR", "a receipt does not fit its frame of %d rows", entry.rows);
        }
        unanswered.remove(r.getFrame());
        boolean isSettled = entry.record(r);
        highestReceipt = Math.max(highestReceipt, entry.lastId);
        if (isSettled) {
            entry.end(null);
            release();
        } else {
            mustRewind = true;
        }
        return isSettled;
    }

    private void release() {
        while (!entries.isEmpty() && entries.get(0).isSettled()) {
            Entry entry = entries.remove(0);
            sent = Math.max(0, sent - 1);
            if (!entry.done.isCompletedExceptionally()) {
                settledUpTo = entry.lastId;
            }
        }
    }

    /** Whether a refusal may mean that the topic has forgotten the producer: only a resume shows it. */
    boolean asksForResume(long frame, SeqdedupeException refusal) {
        Entry entry = unanswered.get(frame);
        return entry != null && (refusal.is("INVALID_EPOCH") || (refusal.is("PREDECESSOR_MISSING")
                && entries.stream().filter(e -> !e.isSettled()).findFirst().orElse(null) == entry));
    }

    /** Handles a refusal. If sending again cannot help, this batch and all later batches fail. */
    void refused(long frame, SeqdedupeException refusal) {
        Entry entry = unanswered.remove(frame);
        if (entry == null) {
            return;
        }
        entry.refused(refusal);
        if (!refusal.isTemporary()) {
            fail(refusal, entry);
            return;
        }
        mustRewind = true;
        retryDelayMs = Math.max(retryDelayMs, refusal.retryDelayMs());
        if (!refusal.is("PREDECESSOR_MISSING")) { // it only follows from another refusal
            lastRefusal = refusal;
        }
    }

    /** Fails the batches from this one on (null: all), and all batches that are added later. */
    void fail(SeqdedupeException why, Entry first) {
        failure = failure == null ? why : failure;
        inFlight.end(failure);
        // If no frame has stored the first batch, none has stored a later one: their links name it.
        boolean isCertain = first != null && first.openFrames == 0;
        List<Entry> failed = List.copyOf(entries.subList(Math.max(entries.indexOf(first), 0), entries.size()));
        for (Entry entry : failed) {
            if (!entry.isSettled() && isCertain) {
                entry.end(why);
            } else if (!entry.isSettled()) {
                entry.giveUp(why);
            }
        }
        unanswered.values().removeIf(Entry::isSettled);
        release();
    }

    /** Returns the error of batches that are given up. */
    SeqdedupeException outcomeUnknown(String what) {
        return SeqdedupeException.of("OUTCOME_UNKNOWN", "%s%s; everything up to sequence ID %d is durable",
                what, lastRefusal == null ? "" : ": " + lastRefusal.getMessage(), durableSequenceId()).because(lastRefusal);
    }
}
