package dev.seqdedupe.client;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.seqdedupe.v1.AdminServiceGrpc;
import io.seqdedupe.v1.CreateTopicRequest;
import io.seqdedupe.v1.DeduplicationMode;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.LongStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class RealSidecarTest {
    private static final Credentials NONE = Credentials.builder().build();
    private static final String RULES = """
            [[allow]]
            subjects = ["**"]
            actions = ["publish", "read"]
            topics = ["**"]
            """;
    private static RealSidecar sidecar;
    private static Client client;

    @BeforeAll
    static void start(@TempDir Path folder) throws Exception {
        sidecar = new RealSidecar(folder);
        client = new Client(sidecar.address, NONE);
    }

    @AfterAll
    static void stop() throws Exception {
        if (client != null) {
            client.close();
            sidecar.close();
        }
    }

    private static List<ReceivedMessage> readAll(String topic) {
        List<ReceivedMessage> all = new ArrayList<>();
        try (Reader reader = client.reader(topic).open()) {
            reader.forEach(all::add);
        }
        return all;
    }

    @Test
    void whatIsSentIsReadBack() {
        Message full = Message.of(new byte[] {0, -1}).withKey("key").withEventTimeMs(-5).withProperties(Map.of("b", "", "a", "é"));
        try (Producer producer = client.producer("fields", "p").open()) {
            assertEquals(-1, producer.lastSequenceId());
            CompletableFuture<Published> first = producer.send(7, full);
            producer.send(Message.of((byte[]) null));
            List<Published> batch = producer.sendBatch(new long[] {20, 30, 40}, List.of(Message.of("x"), full, Message.of(""))).join();
            assertEquals(Verdict.NOT_DUP, first.join().verdict());
            assertEquals(List.of(20L, 30L, 40L), batch.stream().map(Published::sequenceId).toList());
            assertEquals(3, batch.get(1).index());
            assertEquals(40, producer.lastSequenceId());
        }
        List<ReceivedMessage> read = readAll("fields");
        assertEquals(List.of(7L, 8L, 20L, 30L, 40L), read.stream().map(ReceivedMessage::sequenceId).toList());
        for (ReceivedMessage one : List.of(read.get(0), read.get(3))) { // the first of its batch, and a later one
            assertEquals("p", one.producerName());
            assertArrayEquals(full.payload(), one.payload());
            assertArrayEquals(full.key(), one.key());
            assertEquals(full.properties(), one.properties());
            assertEquals(-5, one.eventTimeMs());
        }
        for (ReceivedMessage one : List.of(read.get(1), read.get(2), read.get(4))) {
            assertEquals(null, one.key());
            assertEquals(0, one.eventTimeMs());
            assertEquals(Map.of(), one.properties());
        }
        assertEquals(null, read.get(1).payload());
        assertEquals(0, read.get(4).payload().length);
    }

    @Test
    void aCopyIsADupOfItsOriginal() {
        try (Producer producer = client.producer("copies", "p").open()) {
            producer.sendBatch(null, List.of(Message.of("a"), Message.of("b"))).join();
        }
        try (Producer producer = client.producer("copies", "p").open()) {
            assertEquals(1, producer.lastSequenceId());
            Published copy = producer.send(1, Message.of("b")).join();
            assertEquals(Verdict.DUP, copy.verdict());
            assertEquals(1, copy.index());
            assertEquals(readAll("copies").get(1).messageId(), copy.messageId());
            assertEquals("NOT_ASCENDING",
                    assertThrows(SeqdedupeException.InvalidRequest.class, () -> producer.send(1, Message.of("b"))).reason());
        }
    }

    @Test
    void whoOpensANameLaterFencesItsOwner() {
        Producer old = client.producer("fence", "p").open();
        old.send(Message.of("a")).join();
        try (Producer owner = client.producer("fence", "p").open()) {
            Throwable failure = assertThrows(Exception.class, () -> old.send(Message.of("b")).join()).getCause();
            assertEquals("FENCED", ((SeqdedupeException.Fenced) failure).reason());
            assertFalse(((SeqdedupeException) failure).hint().isEmpty());
            assertThrows(SeqdedupeException.Fenced.class, old::close);
            assertEquals(Verdict.NOT_DUP, owner.send(1, Message.of("b")).join().verdict());
        }
    }

    @Test
    void aReaderStartsWhereItIsTold() throws Exception {
        try (Producer producer = client.producer("starts", "p").open()) {
            producer.sendBatch(null, List.of(Message.of("a"), Message.of("b"), Message.of("c"))).join();
            Position second = readAll("starts").get(1).position();
            assertEquals(second, Position.parse(second.toString()));
            assertEquals(second, Position.fromBytes(second.toBytes()));
            assertEquals(List.of(2L), indexes(client.reader("starts").after(second)));
            assertEquals(List.of(1L), indexes(client.reader("starts").startIndex(1).stopIndex(2)));
            assertEquals(2, client.ends("starts").last().index());
            try (Reader latest = client.reader("starts").latest().follow().open()) {
                CompletableFuture<Long> next = CompletableFuture.supplyAsync(() -> latest.iterator().next().index());
                while (latest.position() == null) {
                    Thread.sleep(5);
                }
                producer.send(Message.of("d")).join();
                assertEquals(3, next.get());
            }
            try (Reader waits = client.reader("starts").after(client.ends("starts").last()).follow().open()) {
                CompletableFuture<Boolean> more = CompletableFuture.supplyAsync(() -> waits.iterator().hasNext());
                Thread.sleep(200);
                waits.close();
                assertFalse(more.get());
            }
            Position other = new Position(1, null, 0, 0);
            assertThrows(SeqdedupeException.PositionLost.class, () -> indexes(client.reader("starts").after(other)));
        }
    }

    private static List<Long> indexes(Reader.Builder builder) {
        List<Long> indexes = new ArrayList<>();
        try (Reader reader = builder.open()) {
            reader.forEach(message -> indexes.add(message.index()));
        }
        return indexes;
    }

    @Test
    void aCursorKeepsThePosition() {
        try (Producer producer = client.producer("cursors", "p").open()) {
            producer.sendBatch(null, List.of(Message.of("a"), Message.of("b"))).join();
        }
        Cursor cursor = client.cursor("cursors", "c");
        assertTrue(cursor.read().isEmpty());
        try (Reader reader = client.reader("cursors").cursor(cursor).open()) {
            Iterator<ReceivedMessage> all = reader.iterator();
            all.next();
            reader.savePosition();
            assertEquals(0, cursor.read().orElseThrow().position().index());
            cursor.compareAndSet(cursor.read().orElseThrow(), new Cursor.Value(reader.position(), "of another"));
            all.next();
            assertEquals("CURSOR_MOVED",
                    assertThrows(SeqdedupeException.Fenced.class, reader::savePosition).reason());
        }
        assertEquals(List.of(1L), indexes(client.reader("cursors").cursor(cursor)));
    }

    @Test
    void aPublisherRecognizesIds() {
        var channel = Grpc.newChannelBuilder(sidecar.address, InsecureChannelCredentials.create()).build();
        AdminServiceGrpc.newBlockingStub(channel).createTopic(CreateTopicRequest.newBuilder()
                .setTopic("persistent://public/default/ids")
                .setDeduplicationMode(DeduplicationMode.DEDUPLICATION_MODE_DEDUPLICATION_ID).build());
        channel.shutdownNow();
        try (Publisher publisher = client.publisher("ids").open()) {
            Published first = publisher.send("evt_1", Message.of("a").withKey("k")).join();
            Published copy = publisher.send("evt_1", Message.of("a")).join();
            assertEquals(Verdict.NOT_DUP, first.verdict());
            assertEquals(Verdict.DUP, copy.verdict());
            assertEquals(first.messageId(), copy.messageId());
            assertEquals(Verdict.NOT_DUP, publisher.send(Message.of("b")).join().verdict());
        }
        assertEquals("evt_1", new String(readAll("ids").get(0).deduplicationId()));
        Throwable failure = assertThrows(Exception.class, () -> {
            try (Publisher publisher = client.publisher("no-such-topic").open()) {
                publisher.send(Message.of("a")).join();
            }
        }).getCause();
        assertEquals("TOPIC_NOT_FOUND", ((SeqdedupeException.NotFound) failure).reason());
    }

    /** Three producers, of which two share a topic and its stream. */
    @Test
    void eachMessageIsStoredOnceAlthoughTheSidecarIsKilled() throws Exception {
        int messages = 15_000;
        Producer[] producers = {client.producer("kills", "a").open(), client.producer("kills", "b").open(),
            client.producer("kills-2", "a").open()};
        AtomicLong receipts = new AtomicLong();
        List<CompletableFuture<Void>> senders = new ArrayList<>();
        for (Producer producer : producers) {
            senders.add(CompletableFuture.runAsync(() -> {
                for (int id = 0; id < messages; id++) {
                    producer.send(id, Message.of("" + id)).thenRun(receipts::incrementAndGet);
                }
                producer.flush();
            }));
        }
        for (int kills = 1; kills <= 3; kills++) {
            while (receipts.get() < 3L * messages * kills / 5) {
                Thread.sleep(1);
            }
            sidecar.kill();
            sidecar.start();
        }
        for (CompletableFuture<Void> sender : senders) {
            sender.join();
        }
        assertEquals(3L * messages, receipts.get());
        checkExactlyOnce("kills", "a", messages);
        checkExactlyOnce("kills", "b", messages);
        checkExactlyOnce("kills-2", "a", messages);
    }

    /** Control: a program that does not send again what had no receipt at a kill. */
    @Test
    void aProgramThatDoesNotSendAgainFailsTheCheck() throws Exception {
        int id = 0;
        for (int attempt = 0; ; attempt++) {
            Client careless = new Client(sidecar.address, NONE);
            Producer producer = careless.producer("careless", "a").open();
            AtomicBoolean isDead = new AtomicBoolean();
            CompletableFuture<Void> kill = CompletableFuture.runAsync(() -> {
                try {
                    Thread.sleep(ThreadLocalRandom.current().nextInt(100));
                    sidecar.kill();
                } catch (InterruptedException e) {
                    throw new IllegalStateException(e);
                }
                isDead.set(true);
                careless.close();
            });
            try {
                while (!isDead.get()) {
                    producer.send(id, Message.of("" + id));
                    id++;
                }
            } catch (SeqdedupeException e) {
                // the producer has ended
            }
            kill.join();
            sidecar.start();
            try (Producer last = client.producer("careless", "a").open()) {
                last.send(++id, Message.of("" + id)).join();
            }
            int sent = ++id;
            try {
                checkExactlyOnce("careless", "a", sent);
            } catch (AssertionError e) {
                return;
            }
            assertNotEquals(10, attempt, "the check finds no lost message");
        }
    }

    private static void checkExactlyOnce(String topic, String producer, int messages) {
        List<Long> stored = readAll(topic).stream().filter(m -> m.producerName().equals(producer))
                .map(ReceivedMessage::sequenceId).toList();
        assertEquals(LongStream.range(0, messages).boxed().toList(), stored);
    }

    @Test
    void tokenAndCertificates(@TempDir Path folder) throws Exception {
        Process certificates = new ProcessBuilder(RealSidecar.PYTHON.toString(), "-c", """
                import sys; from pathlib import Path; from tests.certificates import Authority
                authority = Authority(Path(sys.argv[1]))
                authority.issue("server", "127.0.0.1", "localhost"); authority.issue("client", "app")
                """, folder.toString()).directory(RealSidecar.ROOT.toFile()).inheritIO().start();
        assertEquals(0, certificates.waitFor());
        Path ca = folder.resolve("authority.pem");
        Path rules = Files.writeString(folder.resolve("rules.toml"), RULES);
        try (RealSidecar secure = new RealSidecar(folder, "--authentication", "token",
                "--tls-certificate-file", folder.resolve("server.pem").toString(),
                "--tls-key-file", folder.resolve("server.key").toString(), "--tls-client-ca-file", ca.toString(), "--rules-file", rules.toString())) {
            String token = Files.readString(secure.data().resolve("token"));
            Path certificate = folder.resolve("client.pem");
            Path key = folder.resolve("client.key");
            Credentials.Builder mutual = Credentials.builder().caFile(ca).certificate(certificate, key);
            try (Client c = new Client(secure.address, mutual.token(() -> token).build());
                    Producer producer = c.producer("t", "p").open()) {
                assertEquals(Verdict.NOT_DUP, producer.send(Message.of("a")).join().verdict());
            }
            try (Client c = new Client(secure.address, mutual.token("wrong").build())) {
                assertEquals("UNAUTHENTICATED",
                        assertThrows(SeqdedupeException.AccessDenied.class, () -> c.producer("t", "p").open()).reason());
            }
            try (Client c = new Client(secure.address, Credentials.builder().caFile(certificate).token(token).build())) {
                assertEquals("TLS_FAILED", assertThrows(SeqdedupeException.Unavailable.class, () -> c.ends("t")).reason());
            }
        }
    }
}
