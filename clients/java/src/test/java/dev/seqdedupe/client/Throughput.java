package dev.seqdedupe.client;

import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Collections;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.CompletableFuture;

/**
 * Measures ready batches of 200 messages of 100 bytes, 16 in flight, and one message in flight. Reads a line with the
 * name of a producer, and prints messages per second and the median in milliseconds, until standard input ends.
 * throughput.py compares it with the Python client.
 */
public final class Throughput {
    private static final int ROWS = 200;
    private static final int IN_FLIGHT = 16;

    private Throughput() {}

    /** Takes the address of a sidecar, the number of batches, and the number of single messages. */
    public static void main(String[] args) throws Exception {
        int batches = Integer.parseInt(args[1]);
        int singles = Integer.parseInt(args[2]);
        var in = new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
        try (Client client = new Client(args[0], Credentials.builder().build())) {
            for (String name = in.readLine(); name != null; name = in.readLine()) {
                System.out.printf("%.0f %.4f%n", ready(client, name, batches), oneInFlight(client, name + "-1", singles));
            }
        }
    }

    private static double ready(Client client, String name, int batches) {
        List<Message> messages = Collections.nCopies(ROWS, Message.of(new byte[100]));
        Deque<CompletableFuture<List<Published>>> receipts = new ArrayDeque<>();
        try (Producer producer = client.producer("throughput", name).maxInFlightBatches(IN_FLIGHT).open()) {
            long begin = System.nanoTime();
            for (int k = 0; k < batches; k++) {
                receipts.add(producer.sendBatch(null, messages));
                while (receipts.peek() != null && receipts.peek().isDone()) {
                    receipts.remove().join();
                }
            }
            receipts.forEach(CompletableFuture::join);
            return 1e9 * ROWS * batches / (System.nanoTime() - begin);
        }
    }

    private static double oneInFlight(Client client, String name, int messages) {
        Message message = Message.of(new byte[100]);
        long[] nanos = new long[messages];
        try (Producer producer = client.producer("throughput", name).open()) {
            for (int k = 0; k < messages; k++) {
                long begin = System.nanoTime();
                producer.send(message).join();
                nanos[k] = System.nanoTime() - begin;
            }
        }
        Arrays.sort(nanos);
        return nanos[messages / 2] / 1e6;
    }
}
