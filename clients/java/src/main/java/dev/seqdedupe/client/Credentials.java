package dev.seqdedupe.client;

import io.grpc.ChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.function.Supplier;
import java.util.regex.Pattern;

/**
 * Authenticates the client to its sidecars, and the sidecars to the client: a token, TLS with or without a client
 * certificate, or both.
 *
 * <p>The client reads the token file, or calls the token supplier, for each call and stream, and reads the TLS files for
 * each connection. So all of them may be replaced at any time. With any TLS file, connections to a host and port use
 * TLS. The client sends a token to another host only over TLS (otherwise INSECURE_ADDRESS), and to a port of this
 * machine only if a trusted user listens there (otherwise UNTRUSTED_LISTENER).
 */
public final class Credentials {
    private static final int MAX_TOKEN_BYTES = 6 * 1024;
    private static final int MAX_FILE_BYTES = 1024 * 1024;
    private static final Pattern TOKEN = Pattern.compile("[!-~]{1," + MAX_TOKEN_BYTES + "}");

    private final Supplier<String> token; // null: none
    private final Builder given;

    private Credentials(Builder b) {
        given = b.copy();
        if (given.token != null && given.tokenFile != null) {
            throw SeqdedupeException.of("INVALID_CREDENTIALS", "both a token and a token file are given");
        }
        if ((given.certificateFile == null) != (given.keyFile == null)) {
            throw SeqdedupeException.of("INVALID_CREDENTIALS", "only one of certificate and key is given");
        }
        token = given.tokenFile == null
                ? given.token
                : () -> new String(read(given.tokenFile), StandardCharsets.ISO_8859_1);
        try {
            if (token != null && !given.isTokenSupplied) {
                tokenNow();
            }
            tls();
        } catch (SeqdedupeException e) {
            throw SeqdedupeException.of("INVALID_CREDENTIALS", "%s", e.getMessage()).because(e);
        }
    }

    /** Returns a builder of credentials with neither a token nor TLS. */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Returns the credentials in the environment variables SEQDEDUPE_TOKEN, SEQDEDUPE_TOKEN_FILE (by default
     * {@code ~/.config/seqdedupe/token}, if that file exists), SEQDEDUPE_TLS_CA_FILE, SEQDEDUPE_TLS_CERTIFICATE_FILE,
     * SEQDEDUPE_TLS_KEY_FILE, SEQDEDUPE_ALLOW_INSECURE_TOKEN=true and SEQDEDUPE_SIDECAR_USER. Throws
     * INVALID_CREDENTIALS.
     */
    public static Credentials fromEnvironment() {
        Builder b = builder();
        Path usual = Path.of(System.getProperty("user.home"), ".config", "seqdedupe", "token");
        String text = System.getenv("SEQDEDUPE_TOKEN");
        if (text != null && !text.isEmpty()) {
            b.token(text);
        } else {
            Path file = environmentFile("SEQDEDUPE_TOKEN_FILE");
            b.tokenFile = file != null ? file : Files.isRegularFile(usual) ? usual : null;
        }
        b.caFile = environmentFile("SEQDEDUPE_TLS_CA_FILE");
        b.certificateFile = environmentFile("SEQDEDUPE_TLS_CERTIFICATE_FILE");
        b.keyFile = environmentFile("SEQDEDUPE_TLS_KEY_FILE");
        b.allowsInsecureToken = "true".equalsIgnoreCase(System.getenv("SEQDEDUPE_ALLOW_INSECURE_TOKEN"));
        b.sidecarUser = System.getenv("SEQDEDUPE_SIDECAR_USER");
        return b.build();
    }

    private static Path environmentFile(String variable) {
        String value = System.getenv(variable);
        return value == null || value.isEmpty() ? null : Path.of(value);
    }

    /** Builds {@link Credentials}. */
    public static final class Builder {
        private Supplier<String> token;
        private boolean isTokenSupplied;
        private Path tokenFile;
        private boolean usesTls;
        private Path caFile;
        private Path certificateFile;
        private Path keyFile;
        private boolean allowsInsecureToken;
        private String sidecarUser;

        private Builder() {}

        private Builder copy() {
            Builder b = new Builder();
            b.token = token;
            b.isTokenSupplied = isTokenSupplied;
            b.tokenFile = tokenFile;
            b.usesTls = usesTls;
            b.caFile = caFile;
            b.certificateFile = certificateFile;
            b.keyFile = keyFile;
            b.allowsInsecureToken = allowsInsecureToken;
            b.sidecarUser = sidecarUser == null || sidecarUser.isEmpty() ? null : sidecarUser;
            return b;
        }

        /** Sets the token. */
        public Builder token(String newToken) {
            token = () -> newToken;
            isTokenSupplied = false;
            return this;
        }

        /** Sets a supplier of the token. It is called for each call and stream, and must return at once. */
        public Builder token(Supplier<String> newToken) {
            token = newToken;
            isTokenSupplied = true;
            return this;
        }

        /** Sets the file with one line, the token. */
        public Builder tokenFile(Path file) {
            tokenFile = file;
            return this;
        }

        /** Uses TLS also without any TLS file. Then the authorities are trusted that the JVM trusts. */
        public Builder tls() {
            usesTls = true;
            return this;
        }

        /** Sets the file with the certificates of the trusted authorities, as PEM. Without it, the JVM's are trusted. */
        public Builder caFile(Path file) {
            caFile = file;
            return this;
        }

        /** Sets the files with the client's certificate and its key (PKCS #8), as PEM. */
        public Builder certificate(Path newCertificateFile, Path newKeyFile) {
            certificateFile = newCertificateFile;
            keyFile = newKeyFile;
            return this;
        }

        /** Lets the client send the token to other hosts without TLS, if another layer encrypts the connection. */
        public Builder allowInsecureToken() {
            allowsInsecureToken = true;
            return this;
        }

        /**
         * Sets the user of this machine who runs the sidecar, by name or number. The user of this process, the owner of
         * the token file, and root are always trusted.
         */
        public Builder sidecarUser(String user) {
            sidecarUser = user;
            return this;
        }

        /** Returns the credentials. Throws INVALID_CREDENTIALS for a combination or a file that cannot be used. */
        public Credentials build() {
            return new Credentials(this);
        }
    }

    boolean hasToken() {
        return token != null;
    }

    boolean allowsInsecureToken() {
        return given.allowsInsecureToken;
    }

    Path tokenFile() {
        return given.tokenFile;
    }

    String sidecarUser() {
        return given.sidecarUser;
    }

    /** Returns the current token. Throws CREDENTIALS_UNAVAILABLE; the error contains no part of the token. */
    String tokenNow() {
        String found;
        try {
            found = token.get();
        } catch (SeqdedupeException e) {
            throw e;
        } catch (RuntimeException e) {
            throw SeqdedupeException.of("CREDENTIALS_UNAVAILABLE", "the token supplier has failed: %s", e.getClass());
        }
        if (found == null || !TOKEN.matcher(found.strip()).matches()) {
            throw SeqdedupeException.of("CREDENTIALS_UNAVAILABLE",
                    "the token is not one line of 1 to %d printable ASCII letters without blanks", MAX_TOKEN_BYTES);
        }
        return found.strip();
    }

    /** Returns gRPC's credentials for a new connection, or null without TLS. Throws CREDENTIALS_UNAVAILABLE. */
    ChannelCredentials tls() {
        if (!given.usesTls && given.caFile == null && given.certificateFile == null) {
            return null;
        }
        try {
            TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder();
            if (given.caFile != null) {
                tls.trustManager(new ByteArrayInputStream(read(given.caFile)));
            }
            if (given.certificateFile != null) {
                tls.keyManager(new ByteArrayInputStream(read(given.certificateFile)),
                        new ByteArrayInputStream(read(given.keyFile)));
            }
            return tls.build();
        } catch (IOException e) {
            throw SeqdedupeException.of("CREDENTIALS_UNAVAILABLE", "the TLS files cannot be used: %s", e).because(e);
        }
    }

    private static byte[] read(Path file) {
        try {
            if (Files.size(file) > MAX_FILE_BYTES) {
                throw new IOException("it has more than 1 MiB");
            }
            return Files.readAllBytes(file);
        } catch (IOException e) {
            throw SeqdedupeException.of("CREDENTIALS_UNAVAILABLE", "the file %s cannot be read: %s", file, e).because(e);
        }
    }
}
