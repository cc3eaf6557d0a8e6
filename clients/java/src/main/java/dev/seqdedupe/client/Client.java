package dev.seqdedupe.client;

import com.google.protobuf.Message;
import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.ChannelOption;
import io.grpc.netty.shaded.io.netty.channel.EventLoop;
import io.grpc.netty.shaded.io.netty.channel.EventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.Epoll;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.nio.NioEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.socket.nio.NioSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.unix.DomainSocketAddress;
import io.grpc.netty.shaded.io.netty.util.concurrent.DefaultThreadFactory;
import io.seqdedupe.v1.AdminServiceGrpc;
import io.seqdedupe.v1.GetCursorResponse;
import io.seqdedupe.v1.GetLastMessageIdRequest;
import io.seqdedupe.v1.GetVersionRequest;
import io.seqdedupe.v1.LocateRequest;
import io.seqdedupe.v1.MoveCursorResponse;
import io.seqdedupe.v1.ReadServiceGrpc;
import java.time.Instant;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;

/**
 * A client of one sidecar, or of several sidecars in front of one log. It is safe for use by several threads.
 *
 * <p>The address is {@code host:port} or {@code unix:path}. For several sidecars, give all addresses, separated by
 * commas. A domain ({@code *.example.org}) allows sidecars to redirect the client to any of its hosts.
 *
 * <p>The producers and publishers of a client share one connection to each sidecar, and those of one topic share a
 * stream. Other calls share a second connection. Each reader has its own connection. One thread of the client does all
 * I/O, and completes all futures. So functions that depend on a future must not wait; otherwise pass them an executor
 * ({@code thenApplyAsync}).
 */
public final class Client implements AutoCloseable {
    /** Longer than any wait inside the sidecar. */
    static final long CALL_TIMEOUT_MS = 30_000;
    private static final int MAX_ANSWER_BYTES = 64 << 20;
    private static final int MAX_REMEMBERED = 10_000;
    private static final int MAX_NAME_BYTES = 255;
    private static final Pattern SHORT_TOPIC = Pattern.compile("[\\w.:=-]+");
    private static final Pattern FULL_TOPIC = Pattern.compile("persistent://[\\w.=-]+/[\\w.=-]+/[\\w.:=-]+");
    private static final Metadata.Key<String> EMPTY =
            Metadata.Key.of("seqdedupe-empty", Metadata.ASCII_STRING_MARSHALLER);

    final Sidecars sidecars;
    final EventLoop loop;
    private final EventLoopGroup group;
    private final Credentials credentials;
    private final CallOptions options;
    private final Map<String, ManagedChannel> channels = new HashMap<>();
    private final Map<String, PublishStream> streams = new HashMap<>(); // only the event loop uses it
    private final Map<String, String> foundAt = new ConcurrentHashMap<>();
    private final Set<AutoCloseable> users = ConcurrentHashMap.newKeySet();
    private volatile boolean isClosed;

    /**
     * Makes a client with the credentials of the environment. It does not connect. Throws INVALID_ADDRESS and
     * INVALID_CREDENTIALS.
     */
    public Client(String address) {
        this(address, Credentials.fromEnvironment());
    }

    /** Makes a client that shows these credentials to all sidecars. Throws INVALID_ADDRESS. */
    public Client(String address, Credentials credentials) {
        sidecars = Sidecars.parse(address);
        this.credentials = credentials;
        TokenCalls.trustedUsers(credentials);
        options = credentials.hasToken()
                ? CallOptions.DEFAULT.withCallCredentials(new TokenCalls(credentials))
                : CallOptions.DEFAULT;
        var threads = new DefaultThreadFactory("seqdedupe-client", true);
        group = Epoll.isAvailable() ? new EpollEventLoopGroup(1, threads) : new NioEventLoopGroup(1, threads);
        loop = group.next();
    }

    /** Returns the settings of a producer of this name. Open it with {@link Producer.Builder#open()}. */
    public Producer.Builder producer(String topic, String name) {
        return new Producer.Builder(this, topicName(topic), name);
    }

    /** Returns the settings of a publisher to a topic of deduplication IDs. */
    public Publisher.Builder publisher(String topic) {
        return new Publisher.Builder(this, topicName(topic));
    }

    /** Returns the settings of a reader, which by default begins with the first stored message. */
    public Reader.Builder reader(String topic) {
        return new Reader.Builder(this, topicName(topic));
    }

    /** Returns the cursor of the topic with this name, which the sidecar stores. A topic has at most 32 cursors. */
    public Cursor cursor(String topic, String name) {
        return new SidecarCursor(this, topicName(topic), name);
    }

    /**
     * The two ends of a topic.
     *
     * @param firstIndex the index of the first message that is still stored
     * @param last the position of the last message ever stored
     */
    public record Ends(long firstIndex, Position last) {}

    /** Returns the current ends of a topic. */
    public Ends ends(String topic) {
        var request = GetLastMessageIdRequest.newBuilder().setTopic(topicName(topic)).build();
        var answer = call(request.getTopic(), true, ReadServiceGrpc.getGetLastMessageIdMethod(), request);
        return new Ends(answer.getFirstIndex(), Position.of(answer.getLast()));
    }

    /** Returns the index of the first message published at or after a time, or else the end of the topic. */
    public long locate(String topic, Instant time) {
        var request = LocateRequest.newBuilder().setTopic(topicName(topic)).setPublishTimeMs(time.toEpochMilli()).build();
        return call(request.getTopic(), true, ReadServiceGrpc.getLocateMethod(), request).getIndex();
    }

    /**
     * Ends the client, and its producers, publishers and readers without waiting: messages without a receipt fail with
     * OUTCOME_UNKNOWN. Close the producers and publishers first.
     */
    @Override
    public void close() {
        if (isClosed) {
            return;
        }
        isClosed = true;
        for (AutoCloseable user : users) {
            if (user instanceof Reader reader) {
                reader.close();
            }
        }
        loop.execute(() -> {
            for (AutoCloseable user : users) {
                if (user instanceof Sender sender) {
                    sender.abort("the client was closed");
                }
            }
            synchronized (channels) {
                channels.values().forEach(ManagedChannel::shutdownNow);
                channels.clear();
            }
            group.shutdownGracefully(0, 1, TimeUnit.SECONDS);
        });
    }

    /** Runs a task on the event loop. Throws INVALID_REQUEST if the client was closed. */
    void execute(Runnable task) {
        try {
            loop.execute(task);
        } catch (RejectedExecutionException e) {
            throw SeqdedupeException.of("INVALID_REQUEST", "the client was closed").because(e);
        }
    }

    // -- Connections.

    void register(AutoCloseable user) {
        users.add(user);
    }

    void unregister(AutoCloseable user) {
        users.remove(user);
    }

    CallOptions options() {
        return options;
    }

    /** Returns the shared connection to this sidecar for streams, or the one for calls. */
    ManagedChannel channel(String address, boolean isForStreams) {
        synchronized (channels) {
            return channels.computeIfAbsent(address + " " + isForStreams, key -> newChannel(address));
        }
    }

    /**
     * Drops a connection that is lost or silent. Calls in progress over it continue. The next call makes a new connection,
     * which connects at once, and reads the TLS files again.
     */
    void forget(ManagedChannel channel) {
        synchronized (channels) {
            channels.values().remove(channel);
        }
        channel.shutdown();
    }

    /**
     * Returns a new connection. It connects at the first call. Throws INSECURE_ADDRESS, INVALID_ADDRESS,
     * CREDENTIALS_UNAVAILABLE.
     */
    ManagedChannel newChannel(String address) {
        if (isClosed) {
            throw SeqdedupeException.of("INVALID_REQUEST", "the client was closed");
        }
        NettyChannelBuilder b;
        if (address.startsWith(Sidecars.UNIX)) {
            if (!Epoll.isAvailable()) {
                throw SeqdedupeException.of("INVALID_ADDRESS", "%s: this system has no Unix sockets", address);
            }
            var path = new DomainSocketAddress(address.substring(Sidecars.UNIX.length()));
            b = NettyChannelBuilder.forAddress(path, InsecureChannelCredentials.create())
                    .overrideAuthority("localhost").channelType(EpollDomainSocketChannel.class)
                    .withOption(ChannelOption.SO_KEEPALIVE, null); // of TCP only
        } else {
            ChannelCredentials tls = credentials.tls();
            if (tls == null && credentials.hasToken() && !Sidecars.isLocal(address) && !credentials.allowsInsecureToken()) {
                throw SeqdedupeException.of("INSECURE_ADDRESS",
                        "there is a token, but no TLS connection to the sidecar at %s: nothing was sent", address);
            }
            try {
                b = NettyChannelBuilder.forTarget("dns:///" + address, tls == null ? InsecureChannelCredentials.create() : tls);
            } catch (RuntimeException e) { // a file that is not PEM, perhaps because it is being replaced
                throw SeqdedupeException.of("CREDENTIALS_UNAVAILABLE", "the TLS files cannot be used: %s", e).because(e);
            }
            b.channelType(Epoll.isAvailable() ? EpollSocketChannel.class : NioSocketChannel.class);
        }
        if (sidecars.isOne()) {
            b.keepAliveTime(30, TimeUnit.SECONDS).keepAliveTimeout(30, TimeUnit.SECONDS);
        } else {
            b.keepAliveTime(10, TimeUnit.SECONDS).keepAliveTimeout(5, TimeUnit.SECONDS)
                    .withOption(ChannelOption.CONNECT_TIMEOUT_MILLIS, 5000);
        }
        b.eventLoopGroup(group).executor(loop).maxInboundMessageSize(MAX_ANSWER_BYTES)
                .proxyDetector(target -> null).disableRetry().disableServiceConfigLookUp();
        try {
            return b.build();
        } catch (RuntimeException e) {
            throw SeqdedupeException.of("INVALID_ADDRESS", "%s: %s", address, e).because(e);
        }
    }

    /** Gives the sender a place on the stream to its topic at this sidecar. Runs on the event loop. */
    PublishStream join(String address, Sender sender) {
        String key = address + " " + sender.topic;
        PublishStream stream = streams.get(key);
        if (stream == null) {
            stream = new PublishStream(this, address, sender.topic);
            streams.put(key, stream);
            stream.begin();
        }
        stream.add(sender);
        return stream;
    }

    /** Later senders do not join this stream. */
    void remove(PublishStream stream) {
        streams.values().remove(stream);
    }

    // -- Calls.

    /** Makes one call to this sidecar. The future is completed on the event loop. */
    <Q, A extends Message> CompletableFuture<A> unary(String address, MethodDescriptor<Q, A> method, Q request) {
        CompletableFuture<A> answer = new CompletableFuture<>();
        ManagedChannel channel;
        try {
            channel = channel(address, false);
        } catch (RuntimeException e) {
            return CompletableFuture.failedFuture(SeqdedupeException.of(e, address));
        }
        ClientCall<Q, A> call =
                channel.newCall(method, options.withDeadlineAfter(CALL_TIMEOUT_MS, TimeUnit.MILLISECONDS));
        call.start(new ClientCall.Listener<A>() {
            private A message;

            @Override
            public void onMessage(A received) {
                message = received;
            }

            @Override
            public void onClose(Status status, Metadata trailers) {
                if (!status.isOk()) {
                    SeqdedupeException e = SeqdedupeException.of(status.asRuntimeException(trailers), address);
                    if (e.isOfConnection()) {
                        forget(channel);
                    }
                    answer.completeExceptionally(e);
                } else if (message != null && (message.getSerializedSize() > 0 || trailers.containsKey(EMPTY))) {
                    answer.complete(message);
                } else if (message instanceof GetCursorResponse || message instanceof MoveCursorResponse) {
                    // Earlier sidecars do not mark such an answer. A sidecar's version is never empty.
                    unary(address, AdminServiceGrpc.getGetVersionMethod(), GetVersionRequest.getDefaultInstance())
                            .whenComplete((version, e) -> {
                                if (e == null) {
                                    answer.complete(message);
                                } else {
                                    answer.completeExceptionally(e);
                                }
                            });
                } else {
                    answer.completeExceptionally(SeqdedupeException.of("NOT_A_SIDECAR",
                            "%s answered OK with an empty message, which no sidecar sends", address));
                }
            }
        }, new Metadata());
        call.request(2);
        call.sendMessage(request);
        call.halfClose();
        return answer;
    }

    /**
     * Makes a call to the owner of the topic. Waits for up to 30 seconds while the topic recovers or moves. A call that
     * makes changes is repeated only if the earlier attempt has certainly changed nothing.
     */
    <Q, A extends Message> A call(String topic, boolean isLook, MethodDescriptor<Q, A> method, Q request) {
        checkMayWait();
        Route route = new Route(sidecars, topic);
        route.beginAt(foundAt.get(topic));
        Backoff backoff = new Backoff();
        long giveUpAt = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(CALL_TIMEOUT_MS);
        boolean hasExpired = false;
        while (true) {
            SeqdedupeException e;
            try {
                A answer = await(unary(route.address(), method, request));
                if (foundAt.size() >= MAX_REMEMBERED) {
                    foundAt.clear();
                }
                foundAt.put(topic, route.address());
                return answer;
            } catch (SeqdedupeException failure) {
                if (failure.getCause() instanceof InterruptedException) {
                    throw failure; // which says nothing about the sidecar
                }
                e = route.doubted(failure);
            }
            if (!e.isTemporary()) {
                throw e;
            }
            boolean isExpiry = e.is("TOKEN_EXPIRED") && !hasExpired;
            hasExpired |= isExpiry;
            // A change waits where it may have begun.
            boolean stays = isExpiry || (e.is("RECOVERING") && !isLook);
            if (!stays && !isLook && !Route.passes(e) && !e.isOfUnsentCall()) {
                throw e.isOfConnection()
                        ? SeqdedupeException.of("OUTCOME_UNKNOWN", "the call may have taken effect: %s", e.getMessage()).because(e)
                        : e;
            }
            if (!stays && route.movesOn(e)) {
                continue;
            }
            long delayMs = Math.max(backoff.nextMs(), e.retryDelayMs());
            boolean helps = stays || route.isPassing();
            if (!helps || System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(delayMs) > giveUpAt) {
                throw e;
            }
            sleep(delayMs);
        }
    }

    /** Waits for a future. Throws its error. */
    <T> T await(CompletableFuture<T> future) {
        if (!future.isDone()) {
            checkMayWait();
        }
        try {
            return future.get();
        } catch (ExecutionException e) {
            throw SeqdedupeException.of(e.getCause(), sidecars.addresses().get(0)).again();
        } catch (InterruptedException e) {
            throw interrupted("what was sent may take effect, or not").because(e);
        }
    }

    /** Throws INVALID_REQUEST on the thread for whose work the caller would wait. */
    void checkMayWait() {
        if (loop.inEventLoop()) {
            throw SeqdedupeException.of("INVALID_REQUEST",
                    "a function that depends on a future would wait on the client's own thread: run it on an executor");
        }
    }

    static void sleep(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException e) {
            throw interrupted("the call was not repeated");
        }
    }

    static SeqdedupeException interrupted(String what) {
        Thread.currentThread().interrupt();
        return SeqdedupeException.of("OUTCOME_UNKNOWN", "the thread was interrupted: %s", what);
    }

    private static String topicName(String name) {
        String full = name;
        if (SHORT_TOPIC.matcher(name).matches()) {
            full = "persistent://public/default/" + name;
        } else if (!name.contains("://")) {
            full = "persistent://" + name;
        }
        if (!FULL_TOPIC.matcher(full).matches() || full.length() > MAX_NAME_BYTES) {
            throw SeqdedupeException.of("INVALID_TOPIC_NAME",
                    "%.80s is no topic name: it should be persistent://tenant/namespace/name or a short name", name);
        }
        return full;
    }
}
