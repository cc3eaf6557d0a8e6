package dev.seqdedupe.client;

import io.seqdedupe.v1.CursorValue;
import io.seqdedupe.v1.GetCursorRequest;
import io.seqdedupe.v1.MoveCursorRequest;
import io.seqdedupe.v1.ReadServiceGrpc;
import java.util.Optional;

/** A named cursor of a topic, which the sidecar stores. */
record SidecarCursor(Client client, String topic, String name) implements Cursor {
    @Override
    public Optional<Value> read() {
        var request = GetCursorRequest.newBuilder().setTopic(topic).setName(name).build();
        var answer = client.call(topic, true, ReadServiceGrpc.getGetCursorMethod(), request);
        CursorValue kept = answer.getKept();
        return answer.hasKept() ? Optional.of(new Value(Position.of(kept.getPosition()), kept.getNote())) : Optional.empty();
    }

    @Override
    public void compareAndSet(Value expected, Value replacement) {
        if (!replacement.position().isWhole()) {
            throw SeqdedupeException.of("INVALID_POSITION", "the parts of %s do not fit together", replacement.position());
        }
        var request = MoveCursorRequest.newBuilder().setTopic(topic).setName(name).setNew(toProto(replacement));
        if (expected != null) {
            request.setExpected(toProto(expected));
        }
        client.call(topic, false, ReadServiceGrpc.getMoveCursorMethod(), request.build());
    }

    private static CursorValue toProto(Value value) {
        return CursorValue.newBuilder().setPosition(value.position().toProto()).setNote(value.note()).build();
    }
}
