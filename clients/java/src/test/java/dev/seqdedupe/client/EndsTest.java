package dev.seqdedupe.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.Code;
import io.grpc.Status;
import java.io.IOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.TimeUnit;
import java.util.logging.Handler;
import java.util.logging.Level;
import java.util.logging.LogRecord;
import java.util.logging.Logger;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** How senders end, and what their messages and callers are told then. */
@Timeout(value = 45, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class EndsTest extends WithFakeSidecar {

    private static SeqdedupeException failure(CompletableFuture<?> future) {
        Throwable e = assertThrows(CompletionException.class, () -> future.orTimeout(20, TimeUnit.SECONDS).join()).getCause();
        return assertInstanceOf(SeqdedupeException.class, e);
    }

    private static void fails(String reason, org.junit.jupiter.api.function.Executable call) {
        assertEquals(reason, assertThrows(SeqdedupeException.class, call).reason());
    }

    @Test
    void aTlsFileThatIsHalfWrittenIsReadAgain(@TempDir Path folder) throws Exception {
        Path file = Files.writeString(folder.resolve("ca.pem"), "-----BEGIN CERT");
        Credentials tls = Credentials.builder().caFile(file).build();
        try (Client secure = new Client(sidecar.address(), tls)) {
            fails("CREDENTIALS_UNAVAILABLE", () -> secure.ends("t"));
            Publisher publisher = secure.publisher("t").deliveryTimeout(Duration.ofMillis(500)).open();
            SeqdedupeException e = failure(publisher.send(Message.of("a")));
            assertEquals("OUTCOME_UNKNOWN", e.reason());
            assertEquals("CREDENTIALS_UNAVAILABLE", ((SeqdedupeException) e.getCause()).reason());
        }
    }

    @Test
    void aHostThatGrpcDoesNotTakeIsAnInvalidAddress() {
        try (Client odd = new Client("a b:1", NONE)) {
            fails("INVALID_ADDRESS", () -> odd.producer("t", "p").open());
            assertEquals("INVALID_ADDRESS", failure(odd.publisher("t").open().send(Message.of("a"))).reason());
        }
    }

    @Test
    void times() {
        Producer.Builder b = client.producer("t", "p");
        fails("INVALID_REQUEST", () -> b.linger(null));
        fails("INVALID_REQUEST", () -> b.deliveryTimeout(null));
        fails("INVALID_REQUEST", () -> client.publisher("t").deliveryTimeout(Duration.ofSeconds(-1)));
        Duration longest = Duration.ofSeconds(Long.MAX_VALUE);
        try (Producer producer = b.linger(longest).deliveryTimeout(longest).open()) {
            producer.send(Message.of("a")).join();
        }
    }

    @Test
    void theEndOfAPublisherWaitsForItsReceipts() {
        sidecar.pauseMs = 300;
        Publisher publisher = client.publisher("t").open();
        CompletableFuture<Published> first = publisher.send(Message.of("a"));
        publisher.flush();
        assertEquals(0, first.getNow(null).index());
        CompletableFuture<Published> second = publisher.send(Message.of("b"));
        publisher.close();
        assertEquals(1, second.getNow(null).index());
        fails("INVALID_REQUEST", () -> publisher.send(Message.of("c")));
    }

    @Test
    void theEndOfAPublisherThrowsTheFailureOfAMessage() {
        sidecar.pauseMs = 1000;
        Publisher publisher = client.publisher("t").deliveryTimeout(Duration.ofMillis(200)).open();
        publisher.send(Message.of("a"));
        fails("OUTCOME_UNKNOWN", publisher::close);
    }

    @Test
    void theEndOfTheClientEndsABatchThatTakesMessages() {
        sidecar.unknowns = Integer.MAX_VALUE;
        Producer producer = client.producer("t", "p").linger(Duration.ofHours(1)).open();
        CompletableFuture<Published> sent = producer.send(Message.of("a"));
        while (sidecar.sentFrames() == 0) {
            Thread.onSpinWait();
        }
        CompletableFuture<Published> waiting = producer.send(Message.of("b"));
        client.close();
        assertEquals("OUTCOME_UNKNOWN", failure(sent).reason());
        assertEquals("OUTCOME_UNKNOWN", failure(waiting).reason());
    }

    @Test
    void aCallThatWouldWaitOnTheClientsThreadChangesNothing() {
        Producer producer = client.producer("t", "p").open();
        CompletableFuture<?> first = producer.send(Message.of("a"));
        assertEquals("INVALID_REQUEST", failure(first.thenRun(() -> client.producer("t", "q").open())).reason());
        assertEquals("INVALID_REQUEST", failure(first.thenRunAsync(producer::close, client.loop)).reason());
        producer.send(Message.of("b")).join();
        assertEquals(1, sidecar.openedWith.size());
        producer.close();
    }

    @Test
    void anOpeningThatIsInterruptedIsGivenUp() throws Exception {
        sidecar.openFailures.add(FakeSidecar.error(Code.UNAVAILABLE, "RECOVERING", 500, Map.of()));
        CompletableFuture<Boolean> isInterrupted = new CompletableFuture<>();
        Thread opening = new Thread(() -> {
            fails("OUTCOME_UNKNOWN", () -> client.producer("t", "p").open());
            isInterrupted.complete(Thread.currentThread().isInterrupted());
        });
        opening.start();
        while (sidecar.opens() == 0) {
            Thread.sleep(1);
        }
        opening.interrupt();
        assertTrue(isInterrupted.get(20, TimeUnit.SECONDS));
        Thread.sleep(1200);
        assertEquals(1, sidecar.opens());
    }

    @Test
    void anInterruptIsNoFailureOfASidecar() throws Exception {
        List<String> reached = new ArrayList<>();
        try (ServerSocket a = silent(reached); ServerSocket b = silent(reached);
                Client both = new Client("127.0.0.1:" + a.getLocalPort() + ",127.0.0.1:" + b.getLocalPort(), NONE)) {
            Thread calling = new Thread(() -> fails("OUTCOME_UNKNOWN", () -> both.ends("t")));
            calling.start();
            while (count(reached) == 0) {
                Thread.sleep(1);
            }
            calling.interrupt();
            calling.join(20_000);
            Thread.sleep(500);
            assertEquals(1, count(reached));
        }
    }

    private static int count(List<String> reached) {
        synchronized (reached) {
            return reached.size();
        }
    }

    private static ServerSocket silent(List<String> reached) throws IOException {
        ServerSocket socket = new ServerSocket(0, 50, InetAddress.getByName("127.0.0.1"));
        Thread accepting = new Thread(() -> {
            try {
                while (true) {
                    var connection = socket.accept();
                    synchronized (reached) {
                        reached.add("" + connection);
                    }
                }
            } catch (IOException e) {
                // the end of the test
            }
        });
        accepting.setDaemon(true);
        accepting.start();
        return socket;
    }

    @Test
    void aMessageThatMayBeStoredHasAnUnknownOutcome() {
        sidecar.breaksAt = FakeSidecar.Point.AFTER_STORE;
        sidecar.breaksEvery = 1;
        Producer producer = client.producer("t", "p").open();
        sidecar.openFailures.add(FakeSidecar.error(Code.INVALID_ARGUMENT, "INVALID_NAME", -1, Map.of()));
        SeqdedupeException e = failure(producer.send(Message.of("a")));
        assertEquals("OUTCOME_UNKNOWN", e.reason());
        assertEquals("INVALID_NAME", ((SeqdedupeException) e.getCause()).reason());
        fails("INVALID_NAME", () -> producer.send(Message.of("b")));
        assertEquals(List.of(0L), sidecar.log);
    }

    @Test
    void aStreamThatIsRefusedHasStoredNothing() {
        sidecar.streamRefusal = FakeSidecar.error(Code.NOT_FOUND, "TOPIC_NOT_FOUND", -1, Map.of());
        assertEquals("TOPIC_NOT_FOUND", failure(client.publisher("t").open().send(Message.of("a"))).reason());
    }

    @Test
    void aSizeLimitThatEndsAStreamIsNotFinal() {
        sidecar.breaksEvery = 2;
        sidecar.breaksWith = Status.RESOURCE_EXHAUSTED.withDescription("gRPC message exceeds maximum size 1: 2");
        try (Producer producer = client.producer("t", "p").open()) {
            producer.send(Message.of("a")).join();
            producer.send(Message.of("b")).join();
        }
        assertEquals(List.of(0L, 1L), sidecar.log);
    }

    @Test
    void anAnswerOfALowerTermIsNoAnswer() {
        Producer producer = client.producer("t", "p").open();
        sidecar.lowTerms = 1;
        CompletableFuture<Published> receipt = producer.send(Message.of("a")).orTimeout(10, TimeUnit.SECONDS);
        assertEquals(Verdict.DUP, receipt.join().verdict());
        assertEquals(2, sidecar.opens());
        assertEquals(List.of(), sidecar.wrong);
    }

    @Test
    void anOpenReaderKeepsItsSettings() {
        Reader.Builder b = client.reader("t").cursor(client.cursor("t", "c"));
        try (Reader reader = b.open()) {
            b.cursor(null);
            reader.savePosition(); // without a position, this does nothing
        }
    }

    @Test
    void aProducerThatTheTopicHasForgottenWarns() {
        List<LogRecord> records = new ArrayList<>();
        Handler handler = new Handler() {
            @Override
            public void publish(LogRecord record) {
                records.add(record);
            }

            @Override
            public void flush() {}

            @Override
            public void close() {}
        };
        Logger logger = Logger.getLogger("dev.seqdedupe.client");
        logger.addHandler(handler);
        try (Producer producer = client.producer("t", "p").open()) {
            producer.send(Message.of("a")).join();
            sidecar.forgets = true;
            sidecar.breaksEvery = 2;
            sidecar.breaksAt = FakeSidecar.Point.BEFORE_STORE;
            producer.send(Message.of("b")).join();
            producer.send(Message.of("c")).join();
        } finally {
            logger.removeHandler(handler);
        }
        assertTrue(records.stream().anyMatch(r -> r.getLevel() == Level.WARNING && r.getMessage().contains("forgotten")));
    }

    @Test
    void limitsAndConflicts() {
        fails("INVALID_POSITION", () -> Position.fromBytes(new byte[0]));
        Producer.Builder b = client.producer("t", "p");
        b.maxBatchBytes((8 << 20) - 1024);
        fails("INVALID_REQUEST", () -> b.maxBatchBytes((8 << 20) - 1023));
        fails("INVALID_REQUEST", () -> client.reader("t").startIndex(0).latest().open());
        Position p = new Position(1, null, 0, 0);
        fails("INVALID_REQUEST", () -> client.reader("t").after(p).startIndex(0).open());
        fails("INVALID_REQUEST", () -> client.reader("t").after(p).latest().open());
    }

    /** The fake sidecar has no TLS, so a client with the JVM's trust store does not reach it. */
    @Test
    void tlsNeedsNoFile() {
        try (Client secure = new Client(sidecar.address(), Credentials.builder().tls().build())) {
            SeqdedupeException e = assertThrows(SeqdedupeException.Unavailable.class, () -> secure.ends("t"));
            assertTrue(e.is("TLS_FAILED", "UNREACHABLE"), e.toString());
        }
    }
}
