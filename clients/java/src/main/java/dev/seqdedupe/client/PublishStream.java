package dev.seqdedupe.client;

import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.netty.shaded.io.netty.util.concurrent.ScheduledFuture;
import io.grpc.Status;
import io.seqdedupe.v1.Frame;
import io.seqdedupe.v1.PublishServiceGrpc;
import io.seqdedupe.v1.PublishStreamRequest;
import io.seqdedupe.v1.PublishStreamResponse;
import io.seqdedupe.v1.Receipt;
import io.seqdedupe.v1.Refusal;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;

/**
 * A publish stream to one topic, which several senders share. They take turns, one frame at a time. When the stream ends,
 * all senders receive the reason. All methods run on the client's event loop.
 */
final class PublishStream extends ClientCall.Listener<PublishStreamResponse> {
    /** If frames are in flight and no answer comes for this time, the connection counts as broken. */
    private static final long ANSWER_TIMEOUT_NANOS = TimeUnit.SECONDS.toNanos(30);
    private static final long WATCH_MS = 3000;
    /** At this size, a message takes no more frames: a larger one is not more efficient. */
    private static final int FULL_MESSAGE_BYTES = 160 << 10;
    private static final int MAX_FRAMES = 256;
    /**
     * While other frames are in flight, a message below this size waits for further frames until the next answer, but not
     * for longer than this time. A message costs the sidecar as much as several hundred rows.
     */
    private static final int SMALL_MESSAGE_BYTES = FULL_MESSAGE_BYTES / 2;
    private static final long GATHER_NANOS = TimeUnit.MICROSECONDS.toNanos(300);
    private static final int REQUESTED_ANSWERS = 64;
    private static final Metadata.Key<String> GREETING =
            Metadata.Key.of("seqdedupe-greeting", Metadata.ASCII_STRING_MARSHALLER);
    /** With this detail of the final error, the sidecar has taken none of the stream's frames. */
    private static final String FRAMES_TAKEN = "frames_taken";

    private final Client client;
    private final String address;
    private final String topic;
    private final ManagedChannel channel;
    private final ClientCall<PublishStreamRequest, PublishStreamResponse> call;
    private final Set<Sender> senders = new LinkedHashSet<>();
    private final Set<Sender> turns = new LinkedHashSet<>(); // the senders that may have a frame, the next one first
    private final Map<Long, Sender> frames = new HashMap<>(); // those that wait for their answers
    private PublishStreamRequest.Builder next = PublishStreamRequest.newBuilder(); // the message that gathers frames
    private int nextBytes;
    private ScheduledFuture<?> watch;
    private long answeredAt = System.nanoTime();
    private boolean hasHeaders;
    private boolean isAccepted;
    private boolean isPumping;
    private boolean isGathering;
    private boolean hasEnded;

    private static final class Answers {
        final List<Receipt> receipts = new ArrayList<>();
        final List<Refusal> refusals = new ArrayList<>();
    }

    PublishStream(Client client, String address, String topic) {
        this.client = client;
        this.address = address;
        this.topic = topic;
        channel = client.channel(address, true);
        call = channel.newCall(PublishServiceGrpc.getPublishStreamMethod(), client.options());
    }

    void begin() {
        Metadata metadata = new Metadata();
        metadata.put(GREETING, "1");
        call.start(this, metadata);
        call.request(REQUESTED_ANSWERS);
        call.sendMessage(PublishStreamRequest.newBuilder().setTopic(topic).build());
        watch = client.loop.scheduleWithFixedDelay(this::watch, WATCH_MS, WATCH_MS, TimeUnit.MILLISECONDS);
    }

    void add(Sender sender) {
        senders.add(sender);
    }

    /** The sender may have a frame to send. */
    void ready(Sender sender) {
        if (senders.contains(sender) && turns.add(sender) && !isPumping) {
            // Later, so that frames of one moment share a message.
            isPumping = true;
            client.loop.execute(this::pump);
        }
    }

    /** The sender takes no more answers. Without senders, the stream ends. */
    void leave(Sender sender) {
        send(); // its frames go before it resumes
        senders.remove(sender);
        turns.remove(sender);
        frames.values().removeIf(sender::equals);
        if (senders.isEmpty()) {
            end(SeqdedupeException.of("UNREACHABLE", "the stream to %s was closed", address));
        }
    }

    private void pump() {
        isPumping = false;
        while (!hasEnded && call.isReady() && gather() > 0) {
            boolean mayGrow = turns.isEmpty() && nextBytes < SMALL_MESSAGE_BYTES;
            if (mayGrow && frames.size() > next.getFramesCount()) {
                if (!isGathering) {
                    isGathering = true;
                    client.loop.schedule(this::send, GATHER_NANOS, TimeUnit.NANOSECONDS);
                }
                return;
            }
            send();
        }
    }

    private void send() {
        isGathering = false;
        if (!hasEnded && next.getFramesCount() > 0) {
            call.sendMessage(next.build());
            next = PublishStreamRequest.newBuilder();
            nextBytes = 0;
        }
    }

    /** Adds the frames that are ready to the next message. Returns their number. */
    private int gather() {
        while (nextBytes < FULL_MESSAGE_BYTES && next.getFramesCount() < MAX_FRAMES && !turns.isEmpty()) {
            Sender sender = turns.iterator().next();
            turns.remove(sender);
            Frame frame = nextFrame(sender);
            if (frame != null) {
                answeredAt = frames.isEmpty() ? System.nanoTime() : answeredAt;
                frames.put(frame.getNumber(), sender);
                turns.add(sender);
                next.addFrames(frame);
                nextBytes += frame.getSerializedSize();
            }
        }
        return next.getFramesCount();
    }

    /** Returns the sender's next frame, or null. A failure ends only this sender. */
    private Frame nextFrame(Sender sender) {
        try {
            return sender.nextFrame();
        } catch (RuntimeException e) {
            client.loop.execute(() -> {
                if (senders.contains(sender)) {
                    leave(sender);
                    sender.lost(SeqdedupeException.of(e, address));
                }
            });
            return null;
        }
    }

    private void watch() {
        long silence = System.nanoTime() - answeredAt;
        if (silence <= ANSWER_TIMEOUT_NANOS) {
            return;
        }
        if (!isAccepted) {
            end(SeqdedupeException.of("TOO_MANY_STREAMS", "the sidecar at %s, or a proxy, accepts no more streams", address));
        } else if (!frames.isEmpty()) {
            end(SeqdedupeException.of("OUTCOME_UNKNOWN", "%s has not answered for 30 seconds", address));
        }
    }

    @Override
    public void onReady() {
        pump();
    }

    @Override
    public void onHeaders(Metadata headers) {
        hasHeaders = true;
    }

    @Override
    public void onMessage(PublishStreamResponse answer) {
        if (hasEnded) {
            return;
        }
        call.request(1);
        isAccepted = true;
        if (answer.getSerializedSize() == 0) {
            return; // the greeting
        }
        if (answer.getIncarnation() == 0) {
            end(SeqdedupeException.of("NOT_A_SIDECAR", "%s answered without the topic's incarnation", address));
            return;
        }
        Map<Sender, Answers> all = new LinkedHashMap<>();
        for (Receipt receipt : answer.getReceiptsList()) {
            Answers one = answersOf(receipt.getFrame(), all);
            if (one != null) {
                one.receipts.add(receipt);
            }
        }
        for (Refusal refusal : answer.getRefusalsList()) {
            Answers one = answersOf(refusal.getFrame(), all);
            if (one != null) {
                one.refusals.add(refusal);
            }
        }
        all.forEach((sender, answers) -> {
            if (!senders.contains(sender)) {
                return;
            }
            try {
                if (!sender.accepts(answer)) {
                    throw outdated(answer, answers.refusals); // the frames get no other answer: the sender resumes
                }
                sender.take(answer, answers.receipts, answers.refusals);
                ready(sender);
            } catch (RuntimeException e) {
                leave(sender);
                sender.lost(SeqdedupeException.of(e, address));
            }
        });
        send();
    }

    /** Returns the error for an answer of a lower term. It names the owner if a refusal does. */
    private SeqdedupeException outdated(PublishStreamResponse answer, List<Refusal> refusals) {
        Map<String, String> details = new HashMap<>();
        for (Refusal refusal : refusals) {
            if (!refusal.getOwnerAddress().isEmpty()) {
                details.put(Route.OWNER_ADDRESS, refusal.getOwnerAddress());
            }
        }
        String what = String.format("%s answers with term %d, lower than before", address, answer.getTerm());
        return SeqdedupeException.of("NOT_OWNER", 0, what, details);
    }

    private Answers answersOf(long frame, Map<Sender, Answers> all) {
        Sender sender = frames.remove(frame);
        if (sender == null) {
            return null;
        }
        answeredAt = System.nanoTime();
        return all.computeIfAbsent(sender, key -> new Answers());
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
        if (status.isOk()) {
            end(SeqdedupeException.of("UNREACHABLE", "the sidecar at %s ended the stream", address));
            return;
        }
        SeqdedupeException why = SeqdedupeException.ofStream(status.asRuntimeException(trailers), address);
        // A sidecar accepts a stream before it reads a frame, so a reason without an acceptance refuses the stream.
        boolean isRefused = "0".equals(why.details().get(FRAMES_TAKEN)) || !(hasHeaders || isAccepted || why.isOfConnection());
        end(why, !isRefused);
    }

    private void end(SeqdedupeException why) {
        end(why, true);
    }

    private void end(SeqdedupeException why, boolean mayHaveReadFrames) {
        if (hasEnded) {
            return;
        }
        hasEnded = true;
        watch.cancel(false);
        client.remove(this);
        call.cancel(why.getMessage(), null);
        if (why.isOfConnection() && !senders.isEmpty()) {
            client.forget(channel);
        }
        List.copyOf(senders).forEach(sender -> sender.lost(why, mayHaveReadFrames));
    }
}
