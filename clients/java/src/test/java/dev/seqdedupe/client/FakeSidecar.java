package dev.seqdedupe.client;

import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.rpc.Code;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Server;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import io.seqdedupe.v1.Frame;
import io.seqdedupe.v1.MessageId;
import io.seqdedupe.v1.OpenRequest;
import io.seqdedupe.v1.OpenResponse;
import io.seqdedupe.v1.PublishServiceGrpc;
import io.seqdedupe.v1.PublishStreamRequest;
import io.seqdedupe.v1.PublishStreamResponse;
import io.seqdedupe.v1.Receipt;
import io.seqdedupe.v1.Refusal;
import io.seqdedupe.v1.Verdict;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** A sidecar in this process, for one producer name, with a log in memory. It breaks streams where a test says. */
final class FakeSidecar extends PublishServiceGrpc.PublishServiceImplBase implements AutoCloseable {
    enum Point { BEFORE_STORE, AFTER_STORE, AFTER_RECEIPT }

    static final long INCARNATION = 5;
    static final long TERM = 2;

    final List<Long> log = new ArrayList<>();
    final List<List<Long>> openedWith = new ArrayList<>(); // the epochs of each Open
    final List<Long> openedAt = new ArrayList<>(); // by the system's nanoseconds
    final List<io.grpc.StatusRuntimeException> openFailures = new ArrayList<>(); // of the next calls of Open
    final List<String> wrong = new ArrayList<>(); // the duties that were broken
    boolean deduplicates = true;
    Point breaksAt = Point.BEFORE_STORE;
    Status breaksWith = Status.UNAVAILABLE;
    int breaksEvery; // frames; 0: never
    int unknowns; // the next frames are answered UNKNOWN
    int refusals; // the next frames are refused with RECOVERING
    int lowTerms; // the next frames are answered with a lower term
    boolean forgets; // the next resume says that the topic has forgotten the name
    io.grpc.StatusRuntimeException streamRefusal; // of all streams
    long pauseMs; // before the receipt of messages with deduplication IDs
    private final Server server;
    private final Set<Long> numbers = new HashSet<>();
    private final Set<Long> sentIds = new HashSet<>();
    private long persisted = -1;
    private long epoch;
    private int frames;

    FakeSidecar() throws IOException {
        server = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", 0)).addService(this).build().start();
    }

    String address() {
        return "127.0.0.1:" + server.getPort();
    }

    synchronized int opens() {
        return openedWith.size();
    }

    synchronized int sentFrames() {
        return numbers.size();
    }

    @Override
    public void close() {
        server.shutdownNow();
    }

    static io.grpc.StatusRuntimeException error(Code code, String reason, long delayMs, Map<String, String> metadata) {
        var status = com.google.rpc.Status.newBuilder().setCode(code.getNumber()).setMessage("no [" + reason + "]")
                .addDetails(Any.pack(ErrorInfo.newBuilder().setDomain("seqdedupe").setReason(reason).putAllMetadata(metadata).build()));
        if (delayMs >= 0) {
            status.addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(
                    Duration.newBuilder().setSeconds(delayMs / 1000).setNanos((int) (delayMs % 1000) * 1_000_000)).build()));
        }
        return StatusProto.toStatusRuntimeException(status.build());
    }

    @Override
    public synchronized void open(OpenRequest request, StreamObserver<OpenResponse> answer) {
        openedWith.add(request.getEpochsList());
        openedAt.add(System.nanoTime());
        if (!openFailures.isEmpty()) {
            answer.onError(openFailures.remove(0));
            return;
        }
        if (epoch != 0 && !request.getEpochsList().equals(List.of(epoch))) {
            wrong.add("a resume with the epochs " + request.getEpochsList());
        }
        epoch = (1L << 32) + openedWith.size();
        OpenResponse.Builder opened = OpenResponse.newBuilder();
        if (forgets && request.getEpochsCount() > 0) {
            opened.addForgotten(0);
            persisted = -1;
            sentIds.clear();
        }
        answer.onNext(opened.setIncarnation(INCARNATION).setTerm(TERM).addEpochs(epoch)
                .addPersisted(persisted).addPersistedIndexes(-1).addPersistedMessageIds(MessageId.getDefaultInstance()).build());
        answer.onCompleted();
    }

    @Override
    public StreamObserver<PublishStreamRequest> publishStream(StreamObserver<PublishStreamResponse> out) {
        if (streamRefusal != null) {
            out.onError(streamRefusal);
            return new StreamObserver<>() {
                @Override
                public void onNext(PublishStreamRequest request) {}

                @Override
                public void onError(Throwable failure) {}

                @Override
                public void onCompleted() {}
            };
        }
        out.onNext(PublishStreamResponse.getDefaultInstance());
        return new StreamObserver<>() {
            private boolean hasEnded;

            @Override
            public void onNext(PublishStreamRequest request) {
                synchronized (FakeSidecar.this) {
                    for (Frame frame : request.getFramesList()) {
                        if (!hasEnded) {
                            hasEnded = take(frame, out);
                        }
                    }
                }
            }

            @Override
            public void onError(Throwable failure) {
                hasEnded = true;
            }

            @Override
            public void onCompleted() {
                out.onCompleted();
            }
        };
    }

    /** Returns whether the stream has ended. */
    private boolean take(Frame frame, StreamObserver<PublishStreamResponse> out) {
        if (frame.getBatch().getDeduplicationIdOffsetsCount() > 0) {
            return takeIds(frame, out);
        }
        judge(frame);
        boolean breaks = breaksEvery > 0 && ++frames % breaksEvery == 0;
        if (breaks && breaksAt == Point.BEFORE_STORE) {
            return end(out);
        }
        PublishStreamResponse.Builder answer = PublishStreamResponse.newBuilder().setIncarnation(INCARNATION)
                .setTerm(lowTerms-- > 0 ? TERM - 1 : TERM);
        Receipt.Builder receipt = Receipt.newBuilder().setFrame(frame.getNumber()).setFirstIndex(-1);
        long link = frame.getBatch().getPreviousSequenceIds(0);
        if (refusals > 0 || link > persisted) {
            boolean isMissing = refusals == 0;
            refusals -= isMissing ? 0 : 1;
            out.onNext(answer.addRefusals(Refusal.newBuilder().setFrame(frame.getNumber()).setMessage("no")
                    .setReason(isMissing ? "PREDECESSOR_MISSING" : "RECOVERING")
                    .setRetryDelayMs(isMissing ? 0 : 300)).build());
            return false;
        }
        for (long id : frame.getBatch().getSequenceIdsList()) {
            if (unknowns > 0) {
                receipt.addVerdicts(Verdict.VERDICT_UNKNOWN);
            } else if (deduplicates && id <= persisted) {
                receipt.addVerdicts(Verdict.VERDICT_DUP);
            } else {
                if (receipt.getFirstIndex() < 0) {
                    receipt.setFirstIndex(log.size()).setFirstMessageId(
                            MessageId.newBuilder().setLedgerId(INCARNATION).setEntryId(log.size()).setBatchIndex(-1));
                }
                log.add(id);
                persisted = Math.max(persisted, id);
                receipt.addVerdicts(Verdict.VERDICT_NOT_DUP);
            }
        }
        unknowns -= unknowns > 0 ? 1 : 0;
        if (breaks && breaksAt == Point.AFTER_STORE) {
            return end(out);
        }
        out.onNext(answer.addReceipts(receipt).setDurableIndex(log.size()).build());
        return breaks && end(out);
    }

    private boolean takeIds(Frame frame, StreamObserver<PublishStreamResponse> out) {
        try {
            Thread.sleep(pauseMs);
        } catch (InterruptedException e) {
            return end(out);
        }
        long first = log.size();
        for (int row = 1; row < frame.getBatch().getDeduplicationIdOffsetsCount(); row++) {
            log.add(-1L);
        }
        out.onNext(PublishStreamResponse.newBuilder().setIncarnation(INCARNATION).setTerm(TERM).setDurableIndex(log.size())
                .addReceipts(Receipt.newBuilder().setFrame(frame.getNumber()).setFirstIndex(first).setFirstMessageId(
                        MessageId.newBuilder().setLedgerId(INCARNATION).setEntryId(first).setBatchIndex(-1))).build());
        return false;
    }

    private void judge(Frame frame) {
        if (!numbers.add(frame.getNumber())) {
            wrong.add("the frame number " + frame.getNumber() + " is used twice");
        }
        if (!frame.getBatch().getEpochsList().equals(List.of(epoch))) {
            wrong.add("a frame with the epochs " + frame.getBatch().getEpochsList());
        }
        long first = frame.getBatch().getSequenceIds(0);
        long link = sentIds.stream().filter(id -> id < first).max(Long::compare).orElse(-1L);
        if (frame.getBatch().getPreviousSequenceIds(0) != link) {
            wrong.add("the link " + frame.getBatch().getPreviousSequenceIds(0) + " instead of " + link);
        }
        sentIds.addAll(frame.getBatch().getSequenceIdsList());
    }

    private boolean end(StreamObserver<PublishStreamResponse> out) {
        if (breaksWith.isOk()) {
            out.onCompleted();
        } else {
            out.onError(breaksWith.asRuntimeException());
        }
        return true;
    }
}
