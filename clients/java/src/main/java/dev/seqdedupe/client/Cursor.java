package dev.seqdedupe.client;

import java.util.Optional;

/**
 * Durable storage of one position. After a crash, a reader delivers the messages since the stored position again, so
 * their effects happen at least once. For exactly-once effects, store the position in the same database transaction as
 * the effects.
 *
 * <p>{@link Client#cursor} returns a cursor that the sidecar stores. For other storage, implement this interface.
 */
public interface Cursor {
    /**
     * The value of a cursor.
     *
     * @param position the position
     * @param note a text of the owner, of at most 1,024 bytes in UTF-8
     */
    record Value(Position position, String note) {}

    /** Returns the stored value, or nothing if no value was ever stored. Never returns an older value. */
    Optional<Value> read();

    /**
     * Stores a value in one step, if the stored value equals the expected one (null: nothing is stored). When the call
     * returns, the new value is durable.
     *
     * <p>Throws CURSOR_MOVED if another value is stored, and INVALID_POSITION for a value that cannot be stored. After
     * OUTCOME_UNKNOWN, either the old or the new value is stored.
     */
    void compareAndSet(Value expected, Value replacement);
}
