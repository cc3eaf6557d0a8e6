package dev.seqdedupe.client;

import io.seqdedupe.v1.Batch;
import io.seqdedupe.v1.Receipt;
import java.util.AbstractList;
import java.util.BitSet;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicLong;

/**
 * A batch, from its first message to its last receipt. The sending thread fills it; afterwards only the event loop
 * changes it.
 */
final class Entry {
    /** The frame numbers are unique in the process, as the contract requires. */
    static final AtomicLong FRAME_NUMBERS = new AtomicLong();

    final CompletableFuture<Entry> done = new CompletableFuture<>();
    Columns columns = new Columns();
    int sizeBytes;
    int rows;
    long lastId = -1;

    Batch batch; // null before the batch is sealed, and after it is settled
    List<Long> ids; // empty in a topic of deduplication IDs
    long link; // the highest ID below the first ID that this session sent or that Open returned
    long queuedAt;
    int openFrames; // the frames with this batch of which it is not certain that they stored nothing

    // The outcome. If all rows were stored in one run: the first of them. Otherwise all rows, null while undecided.
    private long firstIndex;
    private MessageId firstId;
    private Published[] each;

    /** Adds a message. Returns its row. */
    int add(Message message, int messageBytes) {
        columns.add(message);
        sizeBytes += messageBytes;
        return columns.rows() - 1;
    }

    /** Ends the filling. The batch counts as in flight until it is settled. */
    void seal(InFlight inFlight) {
        inFlight.add(sizeBytes);
        done.whenComplete((entry, failure) -> inFlight.release(sizeBytes));
        rows = columns.rows();
        batch = columns.build();
        ids = batch.getSequenceIdsList();
        columns = null;
    }

    long firstSequenceId() {
        return ids.get(0);
    }

    boolean isSettled() {
        return done.isDone();
    }

    /** Settles the batch; with an error if it has failed. */
    void end(SeqdedupeException failure) {
        batch = null;
        if (failure == null) {
            done.complete(this);
        } else {
            done.completeExceptionally(failure);
        }
    }

    /**
     * Fails the batch. If a frame may have stored its messages, the error says OUTCOME_UNKNOWN. A topic that is not
     * there stores none.
     */
    void giveUp(SeqdedupeException why) {
        boolean isKnown = openFrames == 0 || why.is("OUTCOME_UNKNOWN") || why.is("TOPIC_NOT_FOUND")
                || why instanceof SeqdedupeException.Fenced || why instanceof SeqdedupeException.DataLoss;
        end(isKnown ? why : SeqdedupeException.of("OUTCOME_UNKNOWN",
                "the message was sent, and may have been stored: %s", why.getMessage()).because(why));
    }

    /** Records that a frame was refused. What was in flight when the owner changed, or the log failed, may be stored. */
    void refused(SeqdedupeException why) {
        if (!why.is("NOT_OWNER", "OUTCOME_UNKNOWN")) {
            openFrames--;
        }
    }

    /** Returns the future outcome of a message. */
    CompletableFuture<Published> receipt(int row) {
        return done.thenApply(entry -> entry.at(row));
    }

    /** Returns the future outcome of all messages, in their order. */
    CompletableFuture<List<Published>> receipts() {
        return done.thenApply(entry -> new AbstractList<>() {
            @Override
            public Published get(int row) {
                return at(row);
            }

            @Override
            public int size() {
                return rows;
            }
        });
    }

    private Published at(int row) {
        return each != null
                ? each[row]
                : new Published(Verdict.NOT_DUP, id(row), firstIndex + row, firstId.later(row), false);
    }

    private long id(int row) {
        return ids.isEmpty() ? -1 : ids.get(row);
    }

    /** Whether a receipt can be that of this batch. */
    boolean fits(Receipt r) {
        int known = r.getKnownRowsCount();
        int runs = r.getRunRowsCount();
        int stored = stored(r);
        return (r.getVerdictsCount() == 0 || r.getVerdictsCount() == rows)
                && r.getVerdictsValueList().stream().allMatch(verdict -> verdict >= 1 && verdict <= 3)
                && r.getKnownIndexesCount() == known
                && r.getKnownLedgerIdsCount() == known
                && r.getKnownEntryIdsCount() == known
                && (r.getKnownBatchIndexesCount() == 0 || r.getKnownBatchIndexesCount() == known)
                && r.getRunLedgerIdsCount() == runs
                && r.getRunEntryIdsCount() == runs
                && r.getRunBatchIndexesCount() == runs
                && r.getKnownRowsList().stream().allMatch(row -> row >= 0 && row < rows)
                && r.getImportedRowsList().stream().allMatch(row -> row >= 0 && row < rows)
                && (stored == 0 || r.getFirstIndex() >= 0)
                && (runs == 0 || r.getRunRowsList().stream().mapToLong(Integer::toUnsignedLong).sum() == stored);
    }

    /** Returns the number of rows that this receipt says are new. */
    int stored(Receipt r) {
        return r.getVerdictsCount() == 0
                ? rows
                : (int) r.getVerdictsList().stream().filter(io.seqdedupe.v1.Verdict.VERDICT_NOT_DUP::equals).count();
    }

    /** Adds a receipt that fits. Rows that have a verdict keep it. Returns whether every row has one. */
    boolean record(Receipt r) {
        if (each == null && r.getVerdictsCount() == 0 && r.getRunRowsCount() == 0) {
            firstIndex = r.getFirstIndex();
            firstId = MessageId.of(r.getFirstMessageId());
            lastId = Math.max(lastId, id(rows - 1));
            return true;
        }
        if (each == null) {
            each = new Published[rows];
        }
        Published[] said = outcomes(r);
        boolean all = true;
        for (int row = 0; row < rows; row++) {
            each[row] = each[row] == null ? said[row] : each[row];
            if (each[row] == null) {
                all = false;
            } else {
                lastId = Math.max(lastId, id(row));
            }
        }
        return all;
    }

    /** Returns the outcome of each row; null for a row with UNKNOWN. */
    private Published[] outcomes(Receipt r) {
        BitSet imported = new BitSet();
        r.getImportedRowsList().forEach(imported::set);
        Published[] said = new Published[rows];
        long index = r.getFirstIndex();
        MessageId id = MessageId.of(r.getFirstMessageId());
        for (int row = 0, run = 0, step = 0; row < rows; row++) {
            int verdict = r.getVerdictsCount() == 0 ? 1 : r.getVerdictsValue(row);
            if (verdict == 2) {
                said[row] = new Published(Verdict.DUP, id(row), -1, null, imported.get(row));
            } else if (verdict == 1) {
                if (r.getRunRowsCount() > 0) {
                    while (step == r.getRunRows(run)) {
                        run++;
                        step = 0;
                    }
                    id = new MessageId(r.getRunLedgerIds(run), r.getRunEntryIds(run), r.getRunBatchIndexes(run));
                }
                said[row] = new Published(Verdict.NOT_DUP, id(row), index++, id.later(step++), false);
            }
        }
        for (int i = 0; i < r.getKnownRowsCount(); i++) {
            int row = r.getKnownRows(i);
            if (said[row] != null && said[row].verdict() == Verdict.DUP) {
                int batchIndex = r.getKnownBatchIndexesCount() == 0 ? -1 : r.getKnownBatchIndexes(i);
                MessageId original = new MessageId(r.getKnownLedgerIds(i), r.getKnownEntryIds(i), batchIndex);
                said[row] = new Published(Verdict.DUP, id(row), r.getKnownIndexes(i), original, false);
            }
        }
        return said;
    }
}
