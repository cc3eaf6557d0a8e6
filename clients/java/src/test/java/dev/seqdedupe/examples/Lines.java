package dev.seqdedupe.examples;

import dev.seqdedupe.client.Client;
import dev.seqdedupe.client.Message;
import dev.seqdedupe.client.Producer;
import dev.seqdedupe.client.Published;
import dev.seqdedupe.client.Reader;
import dev.seqdedupe.client.ReceivedMessage;
import dev.seqdedupe.client.SeqdedupeException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;

/**
 * Publishes the lines of a file, each exactly once, and reads the topic back. The number of a line is its sequence ID. So
 * the program can be killed and started again at any time.
 */
public final class Lines {
    private Lines() {}

    /** Takes the address of a sidecar and a file. */
    public static void main(String[] args) throws IOException {
        List<String> lines = Files.readAllLines(Path.of(args[1]));
        try (Client client = new Client(args[0])) {
            publish(client, lines);
            try (Reader reader = client.reader("lines").open()) {
                for (ReceivedMessage message : reader) {
                    System.out.println(message.sequenceId() + " " + new String(message.payload()));
                }
            }
        } catch (SeqdedupeException e) {
            System.err.println(e.getMessage() + ". " + e.hint());
            System.exit(1);
        }
    }

    private static void publish(Client client, List<String> lines) {
        List<CompletableFuture<Published>> receipts = new ArrayList<>();
        try (Producer producer = client.producer("lines", "file").open()) {
            for (int number = (int) producer.lastSequenceId() + 1; number < lines.size(); number++) {
                receipts.add(producer.send(number, Message.of(lines.get(number))));
            }
        }
        System.out.println(receipts.stream().map(CompletableFuture::join).map(Published::verdict).toList());
    }
}
