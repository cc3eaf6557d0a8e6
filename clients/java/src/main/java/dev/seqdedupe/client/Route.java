package dev.seqdedupe.client;

import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;

/**
 * The sidecar to ask now for a topic. The client asks all sidecars once in a round. If a sidecar names the owner, the
 * client asks the owner next. After a round, the client waits. Use a route in one thread.
 */
final class Route {
    static final String OWNER_ADDRESS = "owner_address";
    /** The redirects that the client follows in a round. */
    private static final int MAX_REDIRECTS = 5;
    /** How often, until a success, the client returns to a sidecar that another one names: the topic moves there. */
    private static final int MAX_RETURNS = 5;
    /**
     * After errors that may last for this time, the client asks every other sidecar once before it waits for the same
     * sidecar again. A recovery usually takes less time.
     */
    private static final long LONGEST_REFUSAL_NS = TimeUnit.SECONDS.toNanos(10);

    /** After this time without an error, the next one begins anew: the client was idle. */
    private static final long LONGEST_GAP_NS = TimeUnit.SECONDS.toNanos(60);

    private final Sidecars sidecars;
    private final List<String> order;
    private final Map<String, SeqdedupeException> asked = new HashMap<>(); // in this round
    private final Set<String> unknownTo = new HashSet<>(); // since the last success
    private final Set<String> older = new HashSet<>(); // with a lower term, since the last answer with the highest term
    private String address;
    private String newest; // the sidecar with the highest term so far
    private int redirects;
    private int returns;
    private Long refusedSince; // in ns: the first error that may last since the last success, or a gap
    private long refusedAt; // in ns: the last such error
    private String waitedAt; // the sidecar whose errors lasted, in a round that this began
    private boolean isOver;

    Route(Sidecars sidecars, String topic) {
        this.sidecars = sidecars;
        order = sidecars.inOrder(topic);
        address = newest = order.get(0);
    }

    String address() {
        return address;
    }

    /** Begins with the sidecar where the topic was last found; null changes nothing. */
    void beginAt(String found) {
        address = found == null ? address : found;
    }

    private void beginRound() {
        asked.clear();
        redirects = 0;
        isOver = false;
        if (waitedAt != null) {
            waitedAt = null;
            refusedSince = null;
        }
    }

    /** Whether the cause of this error usually passes soon, because a topic is moving. */
    static boolean passes(SeqdedupeException e) {
        return e.is("NOT_OWNER", "DRAINING");
    }

    /**
     * Handles an error of the sidecar at the address. Returns whether the address is now another one, which the caller
     * asks at once. Otherwise the caller waits first.
     */
    boolean movesOn(SeqdedupeException why) {
        if (isOver) {
            beginRound();
        }
        asked.put(address, why);
        if (hasLasted(why)) {
            waitedAt = waitedAt == null ? address : waitedAt;
        } else if (!passes(why) && !why.is("UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN")) {
            isOver = true;
            return false;
        }
        String owner = why.is("NOT_OWNER") ? sidecars.allowed(why.details().get(OWNER_ADDRESS)) : null;
        SeqdedupeException said = asked.get(owner);
        if (said != null && !owner.equals(address) && passes(said) && returns < MAX_RETURNS) {
            returns++;
            isOver = true;
            address = owner;
            return false;
        }
        if (owner != null && said == null && redirects < MAX_REDIRECTS) {
            redirects++;
            address = owner;
            return true;
        }
        String next = order.stream().filter(one -> !asked.containsKey(one)).findFirst().orElse(null);
        isOver = next == null;
        address = !isOver ? next : waitedAt != null ? waitedAt : order.get(0);
        return !isOver;
    }

    /**
     * Whether the client has waited long enough at the address because of this error, of a call or a frame, although
     * another sidecar may serve the topic. Then the next step is `movesOn`, which asks other sidecars.
     */
    boolean hasLasted(SeqdedupeException why) {
        boolean mayLast = why.is("RECOVERING", "LOG_REFUSED", "LOG_UNREADABLE", "STORE_UNAVAILABLE", "TOO_MANY_STREAMS");
        if (!mayLast || sidecars.isOne()) {
            return false;
        }
        long now = System.nanoTime();
        if (refusedSince == null || now - refusedAt > LONGEST_GAP_NS) {
            refusedSince = now;
        }
        refusedAt = now;
        return now - refusedSince >= LONGEST_REFUSAL_NS;
    }

    /**
     * Converts an error of the sidecar at the address. A topic that one sidecar does not know may be moving to it. The
     * error counts when all sidecars have returned it.
     */
    SeqdedupeException doubted(SeqdedupeException e) {
        if (!e.is("TOPIC_NOT_FOUND", "NO_STATE") || sidecars.isOne() || e.details().containsKey("shard")) {
            return e;
        }
        unknownTo.add(address);
        return unknownTo.containsAll(order) ? e : SeqdedupeException.of("NOT_OWNER", "%s", e.getMessage()).because(e);
    }

    /**
     * Records the term in an answer of the sidecar at the address; `highest` is that of earlier answers. Returns whether
     * the topic's history was replaced: all listed sidecars, and the sidecar that had the highest term, have a lower one.
     * If only some have, this sidecar is a former owner: throws NOT_OWNER.
     */
    boolean checkTerm(long term, long highest) {
        if (term >= highest) {
            newest = address;
            older.clear();
            return false;
        }
        older.add(address);
        if (older.contains(newest) && older.containsAll(order)) {
            return true;
        }
        throw formerOwner(term, highest);
    }

    /**
     * Converts the refusal of a frame, which has come with this term. If a former owner refuses a frame for good, the
     * sidecar with the highest term decides. A sidecar without the topic's state answers with the term 0.
     */
    SeqdedupeException believed(SeqdedupeException e, long term, long highest) {
        boolean isFormer = 0 < term && term < highest && !address.equals(newest);
        return isFormer && !e.isTemporary() ? formerOwner(term, highest) : doubted(e);
    }

    /** Returns the error of a former owner. It names the sidecar with the highest term, which may be in a domain. */
    private SeqdedupeException formerOwner(long term, long highest) {
        String what = String.format("the sidecar at %s answers with term %d, lower than %d before", address, term, highest);
        return SeqdedupeException.of("NOT_OWNER", 0, what, Map.of(OWNER_ADDRESS, newest));
    }

    /** Whether a sidecar asked in this round has returned an error that usually passes soon. */
    boolean isPassing() {
        return asked.values().stream().anyMatch(e -> e.is("RECOVERING") || (passes(e) && !sidecars.isOne()));
    }

    /** Records a successful call. */
    void goesWell() {
        refusedSince = null;
        unknownTo.clear();
        returns = 0;
        beginRound();
    }
}
