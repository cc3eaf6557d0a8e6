import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.AuthenticationFactory;
import org.apache.pulsar.client.api.ClientBuilder;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.impl.MessageIdImpl;

/**
 * Producers and consumers of Pulsar's Java client, driven by lines on standard input. Each command is answered with `done ...` or
 * `failed ...`. In between, each message has a line `receipt LABEL ID LEDGER:ENTRY` or `error LABEL ID WHY`.
 *
 * <pre>
 * connect URL TOKEN AUTHORITY       `-` is no token, or no file with certificates; ends the client before
 * open LABEL TOPIC NAME HOW COMPRESSION   answers the name and the last sequence ID; `-` is no name
 * send LABEL FIRST LAST             without waiting for receipts
 * later LABEL ID                    a message to be delivered in an hour
 * large LABEL ID BYTES
 * flush LABEL                       waits for receipts
 * load LABEL                        sends IDs after the last one, until `stop`
 * stop LABEL                        answers how many IDs `load` has sent, when all have receipts or errors
 * close LABEL                       also while a load runs, which it ends
 * flood LABEL COUNT BYTES           answers the seconds until the last receipt
 * pace LABEL COUNT BYTES            one in flight; answers the median in microseconds
 * subscribe LABEL TOPIC NAME TYPE   a consumer, from the earliest message on, with receipts for acknowledgements
 * receive LABEL COUNT               answers the IDs
 * acknowledge LABEL ID...           messages that were received
 * acknowledgeUpTo LABEL ID
 * refuse LABEL ID                   negatively
 * take LABEL COUNT                  acknowledges the next messages; answers their IDs
 * seek LABEL ID                     `-`: to the beginning
 * leave LABEL                       closes the consumer
 * read LABEL TOPIC ID               a reader; answers the IDs from there to the end; `-`: from the earliest on
 * </pre>
 *
 * HOW: `gathered` (what is sent until `flush` is one batch), `batches`, `single`, `chunks`, or the schema `json` or
 * `auto`.
 */
public class StockProducer {
    public static class Order {
        public int number;
    }

    static final PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    static final Map<String, Producer<byte[]>> producers = new HashMap<>();
    static final Map<String, Load> loads = new HashMap<>();
    static final Map<String, CompletableFuture<MessageId>> lasts = new ConcurrentHashMap<>();
    static final Map<String, Consumer<byte[]>> consumers = new HashMap<>();
    static final Map<String, Map<String, Message<byte[]>>> received = new HashMap<>();
    static PulsarClient client;

    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = in.readLine()) != null; ) {
            try {
                out.println("done " + perform(line.split(" ")));
            } catch (Exception e) {
                out.println("failed " + why(e));
            }
        }
        System.exit(0);
    }

    static String perform(String[] words) throws Exception {
        if (words[0].equals("connect")) {
            connect(words[1], words[2], words[3]);
            return "";
        }
        String label = words[1];
        if (words[0].equals("open")) {
            return open(label, words[2], words[3], words[4], words[5]);
        }
        if (words[0].equals("subscribe")) {
            consumers.put(label, client.newConsumer().topic(words[2]).subscriptionName(words[3])
                    .subscriptionType(SubscriptionType.valueOf(words[4])).isAckReceiptEnabled(true)
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                    .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS).subscribe());
            received.put(label, new HashMap<>());
            return "";
        }
        if (consumers.containsKey(label)) {
            return consume(consumers.get(label), received.get(label), words);
        }
        Producer<byte[]> producer = producers.get(label);
        switch (words[0]) {
            case "send":
                for (long id = Long.parseLong(words[2]); id <= Long.parseLong(words[3]); id++) {
                    send(label, id, message(producer, id));
                }
                return "";
            case "later":
                long later = Long.parseLong(words[2]);
                send(label, later, message(producer, later).deliverAfter(1, TimeUnit.HOURS));
                return "";
            case "large":
                long id = Long.parseLong(words[2]);
                send(label, id, message(producer, id).value(new byte[Integer.parseInt(words[3])]));
                return "";
            case "flush":
                producer.flush();
                // What completes a flush completes the last message's line a little later.
                lasts.get(label).exceptionally(e -> null).get();
                return "";
            case "load":
                loads.put(label, new Load(label, producer));
                loads.get(label).start();
                return "";
            case "stop":
                return Long.toString(loads.remove(label).finish());
            case "close":
                producer.close();
                return "";
            case "flood":
                return flood(producer, Integer.parseInt(words[2]), Integer.parseInt(words[3]));
            case "pace":
                return pace(producer, Integer.parseInt(words[2]), Integer.parseInt(words[3]));
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    static String consume(Consumer<byte[]> consumer, Map<String, Message<byte[]>> messages, String[] words)
            throws Exception {
        StringBuilder found = new StringBuilder();
        switch (words[0]) {
            case "receive":
                for (int k = 0; k < Integer.parseInt(words[2]); k++) {
                    Message<byte[]> message = consumer.receive(60, TimeUnit.SECONDS);
                    messages.put(Long.toString(message.getSequenceId()), message);
                    found.append(message.getSequenceId()).append(' ');
                }
                return found.toString().trim();
            case "acknowledge":
                for (int k = 2; k < words.length; k++) {
                    consumer.acknowledge(messages.get(words[k]));
                }
                return "";
            case "acknowledgeUpTo":
                consumer.acknowledgeCumulative(messages.get(words[2]));
                return "";
            case "refuse":
                consumer.negativeAcknowledge(messages.get(words[2]));
                return "";
            case "take":
                return take(consumer, Integer.parseInt(words[2]));
            case "seek":
                consumer.seek(words[2].equals("-") ? MessageId.earliest : messages.get(words[2]).getMessageId());
                return "";
            case "leave":
                consumer.close();
                return "";
            case "read":
                MessageId start = words[3].equals("-") ? MessageId.earliest : messages.get(words[3]).getMessageId();
                try (Reader<byte[]> reader = client.newReader().topic(words[2]).startMessageId(start)
                        .startMessageIdInclusive().create()) {
                    while (reader.hasMessageAvailable()) {
                        found.append(reader.readNext(60, TimeUnit.SECONDS).getSequenceId()).append(' ');
                    }
                }
                return found.toString().trim();
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    static void connect(String url, String token, String authority) throws Exception {
        if (client != null) {
            client.shutdown();
        }
        producers.clear();
        consumers.clear();
        ClientBuilder builder = PulsarClient.builder().serviceUrl(url).operationTimeout(60, TimeUnit.SECONDS);
        if (!token.equals("-")) {
            builder.authentication(AuthenticationFactory.token(token));
        }
        if (!authority.equals("-")) {
            builder.tlsTrustCertsFilePath(authority).enableTlsHostnameVerification(true);
        }
        client = builder.build();
    }

    @SuppressWarnings("unchecked")
    static String open(String label, String topic, String name, String how, String compression) throws Exception {
        Schema<?> schema = Schema.BYTES;
        if (how.equals("json")) {
            schema = Schema.JSON(Order.class);
        } else if (how.equals("auto")) {
            schema = Schema.AUTO_PRODUCE_BYTES();
        }
        ProducerBuilder<?> builder = client.newProducer(schema).topic(topic).sendTimeout(0, TimeUnit.SECONDS)
                .blockIfQueueFull(true).compressionType(CompressionType.valueOf(compression));
        if (!name.equals("-")) {
            builder.producerName(name);
        }
        if (how.equals("gathered")) {
            builder.batchingMaxPublishDelay(1, TimeUnit.HOURS);
        } else if (how.equals("single") || how.equals("chunks")) {
            builder.enableBatching(false).enableChunking(how.equals("chunks"));
        }
        Producer<byte[]> producer = (Producer<byte[]>) builder.create();
        producers.put(label, producer);
        return producer.getProducerName() + " " + producer.getLastSequenceId();
    }

    static TypedMessageBuilder<byte[]> message(Producer<byte[]> producer, long id) {
        byte[] payload = ("payload " + id + " ").repeat(10).getBytes(StandardCharsets.UTF_8);
        return producer.newMessage().sequenceId(id).value(payload).key("key " + id)
                .property("number", Long.toString(id)).property("ü", "").eventTime(1_700_000_000_000L + id);
    }

    static String take(Consumer<byte[]> consumer, int count) throws Exception {
        List<String> ids = new ArrayList<>();
        while (ids.size() < count) {
            Message<byte[]> message = consumer.receive();
            if (message.hasProperty("seqdedupe.kind")) {
                throw new IllegalStateException("a sidecar's own entry has come");
            }
            ids.add(message.getProperty("number"));
            consumer.acknowledge(message);
        }
        return String.join(" ", ids);
    }

    static CompletableFuture<MessageId> send(String label, long id, TypedMessageBuilder<byte[]> message) {
        CompletableFuture<MessageId> sent = message.sendAsync().whenComplete((at, e) -> {
            if (e != null) {
                out.println("error " + label + " " + id + " " + why(e));
            } else {
                out.println("receipt " + label + " " + id + " " + place(at));
            }
        });
        lasts.put(label, sent);
        return sent;
    }

    static String place(MessageId id) {
        return id instanceof MessageIdImpl at ? at.getLedgerId() + ":" + at.getEntryId() : id.toString();
    }

    static String why(Throwable e) {
        return (e.getClass().getSimpleName() + ": " + e.getMessage()).replace('\n', ' ');
    }

    static class Load extends Thread {
        final String label;
        final Producer<byte[]> producer;
        volatile boolean isStopped;
        long sent;

        Load(String label, Producer<byte[]> producer) {
            this.label = label;
            this.producer = producer;
            setDaemon(true);
        }

        @Override
        public void run() {
            for (long id = producer.getLastSequenceId() + 1; !isStopped; id++) {
                CompletableFuture<MessageId> last = send(label, id, message(producer, id));
                sent++;
                if (last.isCompletedExceptionally()) {
                    return;
                }
                if (sent % 20 == 0) {
                    try {
                        Thread.sleep(1);
                    } catch (InterruptedException e) {
                        return;
                    }
                }
            }
        }

        long finish() throws Exception {
            isStopped = true;
            join();
            lasts.get(label).exceptionally(e -> null).get();
            return sent;
        }
    }

    static String flood(Producer<byte[]> producer, int count, int bytes) throws Exception {
        byte[] payload = new byte[bytes];
        long began = System.nanoTime();
        CompletableFuture<MessageId> last = null;
        for (int k = 0; k < count; k++) {
            last = producer.sendAsync(payload);
        }
        producer.flush();
        last.get();
        return Double.toString((System.nanoTime() - began) / 1e9);
    }

    static String pace(Producer<byte[]> producer, int count, int bytes) throws Exception {
        byte[] payload = new byte[bytes];
        long[] taken = new long[count];
        for (int k = 0; k < count; k++) {
            long began = System.nanoTime();
            producer.send(payload);
            taken[k] = System.nanoTime() - began;
        }
        Arrays.sort(taken);
        return Double.toString(taken[count / 2] / 1e3);
    }
}
