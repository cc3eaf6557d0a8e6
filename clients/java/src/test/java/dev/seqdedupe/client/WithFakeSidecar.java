package dev.seqdedupe.client;

import java.io.IOException;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;

/** Tests with a sidecar that the test scripts, and a client that is connected to it. */
abstract class WithFakeSidecar {
    static final Credentials NONE = Credentials.builder().build();
    FakeSidecar sidecar;
    Client client;

    @BeforeEach
    void start() throws IOException {
        sidecar = new FakeSidecar();
        client = new Client(sidecar.address(), NONE);
    }

    @AfterEach
    void stop() {
        client.close();
        sidecar.close();
    }
}
