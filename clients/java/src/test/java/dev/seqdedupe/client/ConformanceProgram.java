package dev.seqdedupe.client;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/** Speaks the line protocol of tests/client_conformance on standard input and output. */
public final class ConformanceProgram {
    private static final Gson GSON = new GsonBuilder().serializeNulls().create();
    private final PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    private final Map<String, ExecutorService> queues = new HashMap<>();
    private Map<String, AutoCloseable> objects = new ConcurrentHashMap<>();
    private Client client;

    /** Runs until standard input ends. */
    public static void main(String[] args) throws Exception {
        new ConformanceProgram().run();
        Runtime.getRuntime().halt(0);
    }

    private void run() throws Exception {
        var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JsonObject command = GSON.fromJson(line, JsonObject.class);
            if (text(command, "do").equals("connect")) {
                connect(command);
                continue;
            }
            String on = command.has("on") ? text(command, "on") : "";
            Map<String, AutoCloseable> known = objects;
            queues.computeIfAbsent(on, key -> Executors.newSingleThreadExecutor()).execute(() -> {
                try {
                    JsonObject ok = act(known, text(command, "do"), on, command);
                    if (ok != null) {
                        answer(command, "ok", ok);
                    }
                } catch (SeqdedupeException e) {
                    error(command, e);
                } catch (Throwable e) {
                    e.printStackTrace();
                }
            });
        }
    }

    private void connect(JsonObject command) {
        queues.values().forEach(ExecutorService::shutdownNow);
        queues.clear();
        objects = new ConcurrentHashMap<>();
        if (client != null) {
            client.close();
        }
        List<String> addresses = new ArrayList<>();
        command.getAsJsonArray("addresses").forEach(address -> addresses.add(address.getAsString()));
        client = new Client(String.join(",", addresses));
        answer(command, "ok", new JsonObject());
    }

    /** Does a command. Returns null if the answer follows later. */
    private JsonObject act(Map<String, AutoCloseable> known, String what, String on, JsonObject c) throws Exception {
        JsonObject ok = new JsonObject();
        switch (what) {
            case "hello" -> {
                ok.addProperty("protocol", 1);
                ok.addProperty("client", "java");
                ok.add("lacks", new JsonArray());
            }
            case "open_producer" -> {
                Producer.Builder b = client.producer(text(c, "topic"), text(c, "producer_name"));
                if (c.has("delivery_timeout_ms")) {
                    b.deliveryTimeout(Duration.ofMillis(number(c, "delivery_timeout_ms")));
                }
                if (c.has("max_in_flight_bytes")) {
                    b.maxInFlightBytes((int) number(c, "max_in_flight_bytes"));
                }
                Producer producer = b.open();
                known.put(on, producer);
                ok.addProperty("last_sequence_id", "" + producer.lastSequenceId());
            }
            case "open_publisher" -> {
                Publisher.Builder b = client.publisher(text(c, "topic"));
                if (c.has("delivery_timeout_ms")) {
                    b.deliveryTimeout(Duration.ofMillis(number(c, "delivery_timeout_ms")));
                }
                known.put(on, b.open());
            }
            case "send" -> {
                send(c, known.get(on));
                return null;
            }
            case "flush" -> {
                if (known.get(on) instanceof Publisher publisher) {
                    publisher.flush();
                } else {
                    ((Producer) known.get(on)).flush();
                }
            }
            case "close" -> known.remove(on).close();
            case "open_reader" -> known.put(on, reader(c));
            case "read" -> ok = read((Reader) known.get(on), number(c, "count"));
            case "ends" -> {
                Client.Ends ends = client.ends(text(c, "topic"));
                ok.addProperty("first_index", "" + ends.firstIndex());
                ok.addProperty("last_index", "" + ends.last().index());
            }
            case "get_cursor" -> ok.add("kept",
                    client.cursor(text(c, "topic"), text(c, "name")).read().map(this::json).orElse(JsonNull.INSTANCE));
            case "move_cursor" -> client.cursor(text(c, "topic"), text(c, "name"))
                    .compareAndSet(kept(c.get("expected")), kept(c.get("new")));
            default -> throw new IllegalArgumentException(what);
        }
        return ok;
    }

    private void send(JsonObject command, AutoCloseable sender) {
        List<CompletableFuture<Published>> receipts = new ArrayList<>();
        JsonArray messages = command.getAsJsonArray("messages");
        for (JsonElement element : messages) {
            JsonObject m = element.getAsJsonObject();
            Message message = Message.of(bytes(m, "payload")).withKey(bytes(m, "key"));
            if (m.has("event_time_ms")) {
                message = message.withEventTimeMs(number(m, "event_time_ms"));
            }
            if (m.has("properties")) {
                Map<String, String> properties = new HashMap<>();
                m.getAsJsonObject("properties").entrySet().forEach(p -> properties.put(p.getKey(), p.getValue().getAsString()));
                message = message.withProperties(properties);
            }
            receipts.add(sender instanceof Producer producer
                    ? producer.send(number(m, "sequence_id"), message)
                    : ((Publisher) sender).send(bytes(m, "deduplication_id"), message));
        }
        JsonObject accepted = new JsonObject();
        accepted.add("id", command.get("id"));
        accepted.addProperty("accepted", true);
        out.println(accepted);
        CompletableFuture.allOf(receipts.toArray(CompletableFuture[]::new)).whenComplete((nothing, failure) -> {
            if (failure != null) {
                error(command, (SeqdedupeException) failure.getCause());
                return;
            }
            JsonArray all = new JsonArray();
            for (int i = 0; i < receipts.size(); i++) {
                Published p = receipts.get(i).join();
                JsonObject one = new JsonObject();
                for (String name : List.of("sequence_id", "deduplication_id")) {
                    if (messages.get(i).getAsJsonObject().has(name)) {
                        one.add(name, messages.get(i).getAsJsonObject().get(name));
                    }
                }
                one.addProperty("verdict", p.verdict().name());
                one.addProperty("index", "" + p.index());
                one.add("message_id", json(p.messageId()));
                all.add(one);
            }
            JsonObject ok = new JsonObject();
            ok.add("receipts", all);
            answer(command, "ok", ok);
        });
    }

    private Reader reader(JsonObject c) {
        Reader.Builder b = client.reader(text(c, "topic"));
        JsonElement start = c.get("start");
        if (start.isJsonObject() && start.getAsJsonObject().has("index")) {
            b.startIndex(number(start.getAsJsonObject(), "index"));
        } else if (start.isJsonObject()) {
            b.after(Position.fromBytes(bytes(start.getAsJsonObject(), "position")));
        } else if (start.getAsString().equals("latest")) {
            b.latest();
        }
        if (c.has("stop_index") && !c.get("stop_index").isJsonNull()) {
            b.stopIndex(number(c, "stop_index"));
        }
        if (c.has("follow") && c.get("follow").getAsBoolean()) {
            b.follow();
        }
        return b.open();
    }

    private JsonObject read(Reader reader, long count) {
        JsonArray messages = new JsonArray();
        Iterator<ReceivedMessage> all = reader.iterator();
        while (messages.size() < count && all.hasNext()) {
            ReceivedMessage m = all.next();
            JsonObject one = new JsonObject();
            one.addProperty("index", "" + m.index());
            one.addProperty("producer_name", m.producerName());
            one.addProperty("sequence_id", "" + m.sequenceId());
            one.addProperty("payload", text(m.payload()));
            one.addProperty("position", text(m.position().toBytes()));
            one.add("message_id", json(m.messageId()));
            one.add("properties", GSON.toJsonTree(m.properties()));
            one.addProperty("event_time_ms", "" + m.eventTimeMs());
            if (m.key() != null) {
                one.addProperty("key", text(m.key()));
            }
            if (m.deduplicationId() != null) {
                one.addProperty("deduplication_id", text(m.deduplicationId()));
            }
            messages.add(one);
        }
        JsonObject ok = new JsonObject();
        ok.addProperty("ended", messages.size() < count);
        ok.add("messages", messages);
        return ok;
    }

    private void answer(JsonObject command, String member, JsonElement value) {
        JsonObject line = new JsonObject();
        line.add("id", command.get("id"));
        line.add(member, value);
        out.println(GSON.toJson(line));
    }

    private void error(JsonObject command, SeqdedupeException e) {
        JsonObject error = new JsonObject();
        error.addProperty("reason", e.reason());
        error.addProperty("message", e.getMessage());
        answer(command, "error", error);
    }

    private static String text(JsonObject members, String name) {
        return members.get(name).getAsString();
    }

    private static long number(JsonObject members, String name) {
        return Long.parseLong(members.get(name).getAsString());
    }

    private static byte[] bytes(JsonObject members, String name) {
        JsonElement value = members.get(name);
        return value == null || value.isJsonNull() ? null : Base64.getDecoder().decode(value.getAsString());
    }

    private static String text(byte[] data) {
        return data == null ? null : Base64.getEncoder().encodeToString(data);
    }

    private static JsonElement json(MessageId id) {
        return id == null ? JsonNull.INSTANCE : GSON.toJsonTree(List.of("" + id.ledgerId(), "" + id.entryId(), id.batchIndex()));
    }

    private JsonElement json(Cursor.Value value) {
        return GSON.toJsonTree(Map.of("position", text(value.position().toBytes()), "note", value.note()));
    }

    private static Cursor.Value kept(JsonElement value) {
        return value == null || value.isJsonNull() ? null : new Cursor.Value(
                Position.fromBytes(bytes(value.getAsJsonObject(), "position")), text(value.getAsJsonObject(), "note"));
    }
}
