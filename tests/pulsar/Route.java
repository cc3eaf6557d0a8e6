import org.apache.pulsar.client.api.HashingScheme;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;

/** Pulsar's own producer, which sends each key, also as payload, to a partitioned topic: URL, topic, keys. */
public class Route {
    public static void main(String[] args) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(args[0]).build();
                Producer<byte[]> producer = client.newProducer(Schema.BYTES)
                        .topic(args[1]).hashingScheme(HashingScheme.Murmur3_32Hash).enableBatching(false).create()) {
            for (int k = 2; k < args.length; k++) {
                producer.newMessage().key(args[k]).value(args[k].getBytes("UTF-8")).send();
            }
        }
    }
}
