package dev.seqdedupe.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import com.google.rpc.Code;
import io.grpc.Status;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.LongStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

class BrokenStreamTest extends WithFakeSidecar {
    private static final int MESSAGES = 500;

    private void sendAll() {
        List<CompletableFuture<Published>> receipts = new ArrayList<>();
        try (Producer producer = client.producer("t", "p").maxBatchRows(7).maxInFlightBatches(5).open()) {
            for (int id = 0; id < MESSAGES; id++) {
                receipts.add(producer.send(Message.of("" + id)));
            }
        }
        for (int id = 0; id < MESSAGES; id++) {
            assertEquals(id, receipts.get(id).join().sequenceId());
        }
    }

    private static List<Long> all() {
        return LongStream.range(0, MESSAGES).boxed().toList();
    }

    @ParameterizedTest
    @EnumSource
    void everyMessageIsStoredOnceAndInOrder(FakeSidecar.Point point) {
        sidecar.breaksAt = point;
        sidecar.breaksEvery = 9;
        sendAll();
        assertEquals(all(), sidecar.log);
        assertEquals(List.of(), sidecar.wrong);
        assertTrue(sidecar.openedWith.size() > 5);
    }

    /** Control: a sidecar that stores copies shows that messages are sent again, and that the check finds it. */
    @Test
    void aSidecarThatStoresCopiesFailsTheCheck() {
        sidecar.deduplicates = false;
        sidecar.breaksAt = FakeSidecar.Point.AFTER_STORE;
        sidecar.breaksEvery = 9;
        sendAll();
        assertNotEquals(all(), sidecar.log);
        assertEquals(all(), sidecar.log.stream().distinct().sorted().toList());
    }

    @ParameterizedTest
    @EnumSource(value = Status.Code.class, names = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "UNIMPLEMENTED"})
    void everyEndOfAStreamIsABreak(Status.Code code) {
        sidecar.breaksWith = Status.fromCode(code);
        sidecar.breaksEvery = 30;
        sendAll();
        assertEquals(all(), sidecar.log);
    }

    @Test
    void unknownIsSentAgain() {
        sidecar.unknowns = 4;
        sendAll();
        assertEquals(all(), sidecar.log);
        assertEquals(1, sidecar.openedWith.size());
    }

    @Test
    void refusalsAreRepeatedAfterTheirDelay() {
        sidecar.refusals = 2;
        long begin = System.nanoTime();
        sendAll();
        assertTrue(System.nanoTime() - begin >= TimeUnit.MILLISECONDS.toNanos(300));
        assertEquals(all(), sidecar.log);
        assertEquals(1, sidecar.openedWith.size());
    }

    @Test
    void theOpeningWaitsWhileTheTopicRecovers() {
        sidecar.openFailures.add(FakeSidecar.error(Code.UNAVAILABLE, "RECOVERING", 400, Map.of()));
        sendAll();
        assertTrue(sidecar.openedAt.get(1) - sidecar.openedAt.get(0) >= TimeUnit.MILLISECONDS.toNanos(400));
    }

    @Test
    void theClientGoesToTheOwnerThatItMayReach() throws IOException {
        try (FakeSidecar owner = new FakeSidecar(); FakeSidecar stranger = new FakeSidecar()) {
            for (FakeSidecar named : List.of(stranger, owner)) {
                sidecar.openFailures.add(FakeSidecar.error(Code.UNAVAILABLE, "NOT_OWNER", 10, Map.of("owner_address", named.address())));
                owner.openFailures.add(FakeSidecar.error(Code.UNAVAILABLE, "NOT_OWNER", 10, Map.of("owner_address", sidecar.address())));
            }
            try (Client both = new Client(sidecar.address() + "," + owner.address(), NONE);
                    Producer producer = both.producer("t", "p").open()) {
                producer.send(Message.of("0")).join();
            }
            assertEquals(List.of(), stranger.openedWith);
            assertEquals(1, sidecar.log.size() + owner.log.size());
        }
    }

    /** The examples of weights in publish.proto give this order. */
    @Test
    void sidecarsAreTriedInTheOrderOfTheTopic() {
        Sidecars sidecars = Sidecars.parse("10.0.0.3:6660, 10.0.0.2:6660,10.0.0.1:6660,*.Example.org");
        assertEquals(List.of("10.0.0.1:6660", "10.0.0.3:6660", "10.0.0.2:6660"),
                sidecars.inOrder("persistent://public/default/orders"));
        assertEquals("a.example.org:1", sidecars.allowed("A.example.org:1"));
        assertEquals(null, sidecars.allowed("elsewhere.org#.example.org:1"));
        assertEquals(null, sidecars.allowed("10.0.0.4:6660"));
    }

    /** It may be in a domain: a former owner behind the only listed address is not all there is. */
    @ParameterizedTest
    @ValueSource(strings = {"a:1,b.svc:1", "a:1,*.svc"})
    void aTopicIsReplacedOnlyWhenTheLastOwnerSaysSoToo(String given) {
        Route route = new Route(Sidecars.parse(given), "");
        route.movesOn(SeqdedupeException.of("NOT_OWNER", 0, "moved", Map.of(Route.OWNER_ADDRESS, "b.svc:1")));
        assertFalse(route.checkTerm(5, 0));
        for (int time = 0; time < 2; time++) {
            do {
                route.movesOn(SeqdedupeException.of("UNREACHABLE", "gone"));
            } while (!route.address().equals("a:1"));
            SeqdedupeException former = assertThrows(SeqdedupeException.class, () -> route.checkTerm(4, 5));
            assertEquals("NOT_OWNER", former.reason());
            route.movesOn(former);
            assertEquals("b.svc:1", route.address());
        }
        assertTrue(route.checkTerm(4, 5));
        assertFalse(route.checkTerm(5, 5));
    }

    @Test
    void noReceiptInTimeIsAnUnknownOutcome() {
        sidecar.unknowns = Integer.MAX_VALUE;
        try (Producer producer = client.producer("t", "p").deliveryTimeout(Duration.ofMillis(300)).open()) {
            CompletableFuture<Published> receipt = producer.send(Message.of("a"));
            Throwable failure = assertThrows(CompletionException.class, receipt::join).getCause();
            assertEquals("OUTCOME_UNKNOWN", ((SeqdedupeException.OutcomeUnknown) failure).reason());
            assertThrows(SeqdedupeException.OutcomeUnknown.class, () -> producer.send(Message.of("b")));
        } catch (SeqdedupeException.OutcomeUnknown e) {
            return; // of `close`
        }
        throw new AssertionError("close reports no failure");
    }

    @Test
    void whatDoesNotFitIntoAMessageIsSentInTheNextOne() {
        int frames = 4 * 256;
        try (Producer producer = client.producer("t", "p").maxBatchRows(1).maxInFlightBatches(frames + 1).open()) {
            CompletableFuture<Void> queued = new CompletableFuture<>();
            client.execute(queued::join); // the client's thread finds all frames at once
            List<CompletableFuture<Published>> receipts = new ArrayList<>();
            for (int id = 0; id < frames; id++) {
                receipts.add(producer.send(Message.of("" + id)));
            }
            queued.complete(null);
            CompletableFuture.allOf(receipts.toArray(CompletableFuture[]::new)).orTimeout(60, TimeUnit.SECONDS).join();
        }
        assertEquals(frames, sidecar.log.size());
    }

    @Test
    void sendWaitsForRoom() throws Exception {
        sidecar.unknowns = Integer.MAX_VALUE;
        Producer producer = client.producer("t", "p").maxInFlightBytes(1000).maxBatchRows(1).open();
        CompletableFuture<Integer> sends = CompletableFuture.supplyAsync(() -> {
            int accepted = 0;
            try {
                while (accepted < 100) {
                    producer.send(Message.of(new byte[100]));
                    accepted++;
                }
            } catch (SeqdedupeException e) {
                return accepted;
            }
            return accepted;
        });
        Thread.sleep(300);
        client.close();
        assertEquals(7, sends.get()); // of 148 bytes each
    }

    @Test
    void aFunctionOfAReceiptThatWouldWaitOnTheClientsThreadIsToldSo() {
        try (Producer producer = client.producer("t", "p").open()) {
            CompletableFuture<Void> waits = producer.send(Message.of("a")).thenRun(producer::flush);
            Throwable failure = assertThrows(CompletionException.class, waits::join).getCause();
            assertEquals("INVALID_REQUEST", ((SeqdedupeException) failure).reason());
        }
    }

    @Test
    void nobodyListens() {
        sidecar.close();
        assertEquals("UNREACHABLE", assertThrows(SeqdedupeException.Unavailable.class, () -> client.ends("t")).reason());
    }

    @Test
    void aTokenIsNotSentInClearToOtherHosts() {
        try (Client far = new Client("192.0.2.1:6660", Credentials.builder().token("secret").build())) {
            SeqdedupeException e = assertThrows(SeqdedupeException.Configuration.class, () -> far.ends("t"));
            assertEquals("INSECURE_ADDRESS", e.reason());
            assertThrows(SeqdedupeException.Configuration.class, () -> far.producer("t", "p").open());
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"", "host", "host:65536", "a/b:1", "unix:", "*.1"})
    void addressesThatAreNone(String text) {
        assertEquals("INVALID_ADDRESS", assertThrows(SeqdedupeException.class, () -> new Client(text, NONE)).reason());
    }

    /** The resource has the reasons, hints and delays of the sidecar's own list. */
    @Test
    void theReasonsAreThoseOfTheSidecar() throws Exception {
        assumeTrue(Files.isExecutable(RealSidecar.PYTHON), "skipped: no Python");
        Process list = new ProcessBuilder(RealSidecar.PYTHON.toString(), "-c", """
                from seqdedupe.errors import REASONS
                for name, r in REASONS.items():
                    print(f"{name}={r.kind.__name__.removesuffix('Error')} {r.retry_delay_ms} {r.hint}")
                """).directory(RealSidecar.ROOT.toFile()).redirectError(ProcessBuilder.Redirect.INHERIT).start();
        Set<Object> expected = rows(list.getInputStream());
        Set<Object> found = rows(SeqdedupeException.class.getResourceAsStream("reasons.properties"));
        assertEquals(expected.size(), found.size());
        expected.removeAll(found);
        assertEquals(Set.of(), expected);
    }

    private static Set<Object> rows(InputStream in) throws IOException {
        Properties rows = new Properties();
        rows.load(new InputStreamReader(in, StandardCharsets.UTF_8));
        return new HashSet<>(rows.entrySet());
    }
}
