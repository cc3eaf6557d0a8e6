package dev.seqdedupe.client;

import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;

/** A sidecar process of this repository. Tests that need it are skipped if its Python environment is not there. */
final class RealSidecar implements AutoCloseable {
    static final Path ROOT = Path.of("../..").toAbsolutePath().normalize();
    static final Path PYTHON = ROOT.resolve(".venv/bin/python");

    final String address;
    private final Path folder;
    private final List<String> flags;
    private Process process;

    RealSidecar(Path folder, String... moreFlags) throws IOException, InterruptedException {
        assumeTrue(Files.isExecutable(PYTHON), () -> "skipped: there is no sidecar to test with, `make .venv` makes " + PYTHON);
        this.folder = folder;
        try (ServerSocket free = new ServerSocket(0)) {
            address = "127.0.0.1:" + free.getLocalPort();
        }
        flags = new ArrayList<>(List.of(moreFlags));
        if (!flags.contains("--authentication")) {
            flags.addAll(List.of("--authentication", "none"));
        }
        start();
    }

    Path data() {
        return folder.resolve("data");
    }

    void start() throws IOException, InterruptedException {
        List<String> command = new ArrayList<>(List.of(PYTHON.toString(), "-m", "broker_sidecar",
                "--data-directory", data().toString(), "--listen", address));
        command.addAll(flags);
        Path log = folder.resolve("sidecar.log");
        Files.deleteIfExists(log);
        process = new ProcessBuilder(command).directory(ROOT.toFile())
                .redirectErrorStream(true).redirectOutput(log.toFile()).start();
        while (!Files.readString(log).contains("\"serving\"")) {
            if (!process.isAlive()) {
                throw new IOException("the sidecar has ended: " + Files.readString(log));
            }
            Thread.sleep(20);
        }
    }

    /** kill -9. */
    void kill() throws InterruptedException {
        process.destroyForcibly().waitFor();
    }

    @Override
    public void close() throws InterruptedException {
        process.destroy();
        if (!process.waitFor(10, TimeUnit.SECONDS)) {
            kill();
        }
    }
}
