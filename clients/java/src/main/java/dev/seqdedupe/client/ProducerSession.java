package dev.seqdedupe.client;

import com.google.protobuf.ByteString;
import io.grpc.netty.shaded.io.netty.util.concurrent.ScheduledFuture;
import io.seqdedupe.v1.Frame;
import io.seqdedupe.v1.OpenRefusal;
import io.seqdedupe.v1.OpenRequest;
import io.seqdedupe.v1.OpenResponse;
import io.seqdedupe.v1.PublishServiceGrpc;
import io.seqdedupe.v1.PublishStreamResponse;
import io.seqdedupe.v1.Receipt;
import io.seqdedupe.v1.Refusal;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/** The session of a producer name: it opens, sends, and resumes, on the client's event loop. */
final class ProducerSession extends Sender {
    /** The limit of the opening. Resuming a session has no limit. */
    private static final long OPEN_TIMEOUT_MS = 30_000;
    private static final System.Logger LOG = System.getLogger(ProducerSession.class.getPackageName());

    final CompletableFuture<Long> opened = new CompletableFuture<>();
    private final String name;
    private final SendQueue queue;
    private final Supplier<Entry> takeFilling;
    private ScheduledFuture<?> rewinds;
    private boolean hasResumedInVain; // after a refusal, and no receipt has arrived since

    ProducerSession(Client client, String topic, String name, ByteString nameBytes, InFlight inFlight,
            Supplier<Entry> takeFilling) {
        super(client, topic);
        this.takeFilling = takeFilling;
        this.name = name;
        queue = new SendQueue(nameBytes, inFlight);
    }

    void begin(long deliveryTimeoutMs) {
        client.loop.schedule(() -> {
            if (!queue.isOpen) {
                fail(lastError != null ? lastError : queue.outcomeUnknown("the producer was not opened in time"), true);
                end();
            }
        }, OPEN_TIMEOUT_MS, TimeUnit.MILLISECONDS);
        start(false, deliveryTimeoutMs);
    }

    @Override
    void add(Entry entry) {
        queue.add(entry);
        wake();
    }

    @Override
    CompletableFuture<Void> settled() {
        return queue.failure != null && queue.isEmpty()
                ? CompletableFuture.failedFuture(queue.failure)
                : CompletableFuture.allOf(queue.entries().stream().map(e -> e.done).toArray(CompletableFuture[]::new));
    }

    @Override
    CompletableFuture<Void> open(String address) {
        OpenRequest.Builder request = OpenRequest.newBuilder().setTopic(topic).addProducerNames(name);
        if (queue.isOpen) {
            request.addEpochs(queue.epoch());
        }
        return client.unary(address, PublishServiceGrpc.getOpenMethod(), request.build())
                .thenAccept(answer -> opened(address, answer));
    }

    private void opened(String address, OpenResponse answer) {
        if (answer.getIncarnation() == 0 || answer.getEpochsCount() != 1 || answer.getPersistedCount() != 1) {
            throw SeqdedupeException.of("NOT_A_SIDECAR", "the answer of %s does not open a session", address);
        }
        for (OpenRefusal r : answer.getRefusalsList()) {
            Map<String, String> details = Map.of("current_epoch", "" + r.getCurrentEpoch());
            SeqdedupeException e = SeqdedupeException.of(r.getReason(), SeqdedupeException.NEVER, r.getMessage(), details);
            throw e.is("INVALID_EPOCH") ? unknownSession(e) : e;
        }
        // If the whole history was replaced, the queue decides which messages are lost.
        route.checkTerm(answer.getTerm(), queue.term);
        if (queue.open(answer)) {
            LOG.log(System.Logger.Level.WARNING, "The topic {0} has forgotten the producer {1}, as its policy says. A message "
                    + "that is sent again is stored again.", topic, name);
        }
        opened.complete(queue.opened);
    }

    private static SeqdedupeException unknownSession(SeqdedupeException e) {
        return SeqdedupeException.of("DATA_LOSS", "the sidecar does not know the session that it has opened: %s",
                e.getMessage()).because(e);
    }

    @Override
    boolean hasBegun() {
        return queue.isOpen;
    }

    @Override
    boolean isIdle() {
        return queue.isEmpty();
    }

    @Override
    Frame nextFrame() {
        return queue.nextFrame();
    }

    @Override
    boolean accepts(PublishStreamResponse answer) {
        return answer.getTerm() >= queue.term;
    }

    @Override
    void take(PublishStreamResponse answer, List<Receipt> receipts, List<Refusal> refusals) {
        queue.check(answer.getIncarnation());
        queue.term = answer.getTerm();
        queue.durableIndex = Math.max(queue.durableIndex, answer.getDurableIndex());
        for (Receipt receipt : receipts) {
            if (queue.receipt(receipt)) {
                goesWell();
            }
        }
        for (Refusal refusal : refusals) {
            refused(refusal.getFrame(), SeqdedupeException.of(refusal));
        }
        if (queue.failure != null && queue.isEmpty()) {
            end();
        } else if (queue.mustRewind && !queue.hasUnanswered() && rewinds == null) {
            isInTrouble = true;
            rewinds = client.loop.schedule(() -> {
                rewinds = null;
                queue.rewind();
                wake();
            }, Math.max(backoff.nextMs(), queue.retryDelayMs), TimeUnit.MILLISECONDS);
        }
    }

    private void refused(long frame, SeqdedupeException why) {
        isInTrouble = true;
        if (!hasResumedInVain && queue.asksForResume(frame, why)) {
            hasResumedInVain = true;
            throw why;
        }
        queue.refused(frame, why);
        failFilling();
        if (why.is("NOT_OWNER") || route.hasLasted(why)) {
            throw why; // the session resumes at the owner
        }
    }

    @Override
    void goesWell() {
        super.goesWell();
        hasResumedInVain = false;
        queue.lastRefusal = null;
    }

    @Override
    void streamEnded(boolean mayHaveReadFrames) {
        if (!mayHaveReadFrames) {
            queue.nothingArrived();
        }
        if (rewinds != null) {
            rewinds.cancel(false);
            rewinds = null;
        }
    }

    @Override
    SeqdedupeException converted(SeqdedupeException e) {
        if (e.is("INVALID_EPOCH")) {
            return null; // of a frame: the session resumes
        }
        if (e.is("TOPIC_NOT_FOUND") && queue.isOpen) {
            return unknownSession(e);
        }
        if (e instanceof SeqdedupeException.AccessDenied && !queue.isEmpty()) {
            queue.lastRefusal = e;
            return queue.outcomeUnknown("producer " + name + " may not go on");
        }
        return e;
    }

    @Override
    void fail(SeqdedupeException why, boolean isFinal) {
        opened.completeExceptionally(why);
        queue.fail(why, null);
        failFilling();
        if (!isFinal) {
            end(); // the opening has failed, which is final for a producer
        }
    }

    /** After a failure, nothing else ends the batch that takes messages. */
    private void failFilling() {
        Entry filling = queue.failure == null ? null : takeFilling.get();
        if (filling != null) {
            queue.add(filling);
        }
    }

    @Override
    void expire(long before) {
        if (!queue.isEmpty() && queue.entries().get(0).queuedAt - before <= 0) {
            queue.lastRefusal = queue.lastRefusal == null ? lastError : queue.lastRefusal;
            abort("no receipt arrived within the delivery timeout");
        }
    }

    @Override
    SeqdedupeException abort(String what) {
        fail(queue.outcomeUnknown(what), true);
        end();
        return queue.failure;
    }
}
