import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;

/** A producer of Pulsar's Java client that is killed. `killed_producer.py` says what it does and prints. */
public class KilledProducer {
    static final PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    static final CountDownLatch over = new CountDownLatch(1);
    static final Semaphore answered = new Semaphore(0);

    public static void main(String[] args) throws Exception {
        // The client logs there too.
        System.setOut(System.err);
        String name = args[2];
        long known = Long.parseLong(args[3]);
        int back = Integer.parseInt(args[4]);
        Random random = new Random(Long.parseLong(args[5]));
        int pauseMs = Integer.parseInt(args[6]);
        Thread waiting = new Thread(KilledProducer::waitForEnd);
        waiting.setDaemon(true);
        waiting.start();
        // The client's own waits are up to a minute.
        PulsarClient client = PulsarClient.builder().serviceUrl(args[0]).maxBackoffInterval(1, TimeUnit.SECONDS).build();
        Producer<byte[]> producer = open(client, args[1], name);
        long last = producer.getLastSequenceId();
        out.println("opened " + last);
        long first = Math.max(1, Math.max(last, known) + 1 - back);
        long next = first;
        int burst = back;
        while (over.getCount() > 0) {
            long end = next + burst + 1 + random.nextInt(29);
            out.println("sent " + next + " " + (end - 1));
            for (; next < end; next++) {
                send(producer, name, next);
            }
            burst = 0;
            Thread.sleep(random.nextInt(pauseMs + 1));
        }
        answered.acquire((int) (next - first));
        client.close();
        out.println("done");
        System.exit(0);
    }

    static void waitForEnd() {
        try {
            while (System.in.read() >= 0) {
                continue;
            }
        } catch (IOException e) {
            // It has ended.
        }
        over.countDown();
    }

    static Producer<byte[]> open(PulsarClient client, String topic, String name) throws Exception {
        while (true) {
            try {
                return client.newProducer().topic(topic).producerName(name).sendTimeout(0, TimeUnit.SECONDS)
                        .blockIfQueueFull(true).maxPendingMessages(1000)
                        .batchingMaxPublishDelay(2, TimeUnit.MILLISECONDS)
                        .compressionType(CompressionType.LZ4).create();
            } catch (PulsarClientException e) {
                out.println("refused " + why(e));
                if (over.await(50, TimeUnit.MILLISECONDS)) {
                    System.exit(0);
                }
            }
        }
    }

    static void send(Producer<byte[]> producer, String name, long id) {
        byte[] payload = (name + "/" + id).getBytes(StandardCharsets.UTF_8);
        producer.newMessage().sequenceId(id).value(payload).sendAsync().whenComplete((at, e) -> {
            if (e != null) {
                out.println("error " + id + " " + why(e));
            } else {
                MessageIdAdv place = (MessageIdAdv) at;
                out.println("receipt " + id + " " + place.getLedgerId() + " " + place.getEntryId() + " "
                        + place.getBatchIndex());
            }
            answered.release();
        });
    }

    static String why(Throwable e) {
        return e.toString().replace('\n', ' ');
    }
}
