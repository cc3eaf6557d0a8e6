import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.CryptoKeyReader;
import org.apache.pulsar.client.api.EncryptionKeyInfo;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.TypedMessageBuilder;

/** Sends to a topic what Java's client makes of the same rows: Entries SERVICE_URL TOPIC PUBLIC_KEY_FILE. */
public class Entries {
    public static void main(String[] arguments) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            for (CompressionType compression : CompressionType.values()) {
                send(builder(client, arguments[1]).compressionType(compression));
            }
            send(builder(client, arguments[1]).enableBatching(false));
            CryptoKeyReader keys = new CryptoKeyReader() {
                public EncryptionKeyInfo getPublicKey(String name, Map<String, String> metadata) {
                    try {
                        return new EncryptionKeyInfo(Files.readAllBytes(Path.of(arguments[2])), new HashMap<>());
                    } catch (java.io.IOException e) {
                        throw new java.io.UncheckedIOException(e);
                    }
                }

                public EncryptionKeyInfo getPrivateKey(String name, Map<String, String> metadata) {
                    return null;
                }
            };
            send(builder(client, arguments[1]).addEncryptionKey("key").cryptoKeyReader(keys));
            try (Producer<byte[]> producer = builder(client, arguments[1])
                    .enableBatching(false).enableChunking(true).chunkMaxMessageSize(50).create()) {
                producer.newMessage().value(new byte[100]).sequenceId(7).send();
            }
        }
    }

    private static ProducerBuilder<byte[]> builder(PulsarClient client, String topic) {
        return client.newProducer(Schema.BYTES).topic(topic).batchingMaxPublishDelay(10, TimeUnit.SECONDS);
    }

    private static void send(ProducerBuilder<byte[]> builder) throws Exception {
        try (Producer<byte[]> producer = builder.producerName("stock").create()) {
            message(producer, "first").sequenceId(10).sendAsync();
            message(producer, "second").sequenceId(20).key("key").property("name", "value").property("", "ü")
                    .eventTime(1700000000000L).sendAsync();
            message(producer, null).sequenceId(30).keyBytes(new byte[] {0, 1}).orderingKey("o".getBytes()).sendAsync();
            producer.flush();
        }
    }

    private static TypedMessageBuilder<byte[]> message(Producer<byte[]> producer, String text) {
        return producer.newMessage().value(text == null ? null : text.getBytes());
    }
}
