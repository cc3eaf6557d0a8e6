package dev.seqdedupe.client;

import io.grpc.Attributes;
import io.grpc.CallCredentials;
import io.grpc.Grpc;
import io.grpc.Metadata;
import io.grpc.Status;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.UnknownHostException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.List;
import java.util.Set;
import java.util.concurrent.Executor;

/**
 * Shows the token in each call. Before that, if the connection goes to a port of this machine without TLS, it checks
 * which user has the other end: while the sidecar is down, any user may listen there.
 */
final class TokenCalls extends CallCredentials {
    private static final Metadata.Key<String> AUTHORIZATION =
            Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    /** The number that the kernel reports for every user outside the user namespace of this process. */
    private static final long STRANGER = 65_534;
    private static final long ALL_USERS = (1L << 32) - 1;
    private static final int ROOT = 0;

    private final Credentials credentials;

    TokenCalls(Credentials credentials) {
        this.credentials = credentials;
    }

    @Override
    public void applyRequestMetadata(RequestInfo request, Executor executor, MetadataApplier applier) {
        try {
            check(request.getTransportAttrs());
            Metadata metadata = new Metadata();
            metadata.put(AUTHORIZATION, "Bearer " + credentials.tokenNow());
            applier.apply(metadata);
        } catch (SeqdedupeException e) {
            applier.fail(Status.UNAUTHENTICATED.withCause(e));
        }
    }

    private void check(Attributes connection) {
        if (connection.get(Grpc.TRANSPORT_ATTR_SSL_SESSION) == null
                && connection.get(Grpc.TRANSPORT_ATTR_REMOTE_ADDR) instanceof InetSocketAddress there
                && connection.get(Grpc.TRANSPORT_ATTR_LOCAL_ADDR) instanceof InetSocketAddress here
                && there.getAddress().isLoopbackAddress()) {
            Set<Long> trusted = trustedUsers(credentials);
            for (long user : usersAt(there, here)) {
                if (!trusted.contains(user)) {
                    throw SeqdedupeException.of("UNTRUSTED_LISTENER",
                            "user %d listens at %s: the token was not sent there", user, there);
                }
            }
        }
    }

    /** Returns the users of this machine to whom the client may send the token. Throws INVALID_CREDENTIALS. */
    static Set<Long> trustedUsers(Credentials credentials) {
        Set<Long> users = new HashSet<>(Set.of((long) ROOT));
        if (credentials.sidecarUser() != null) {
            users.add(userNumber(credentials.sidecarUser()));
        }
        for (Path owned : new Path[] {Path.of("/proc/self"), credentials.tokenFile()}) {
            try {
                if (owned != null) {
                    users.add(((Number) Files.getAttribute(owned, "unix:uid")).longValue());
                }
            } catch (IOException | UnsupportedOperationException e) {
                // another user is not trusted without this file
            }
        }
        long known = 0;
        for (String line : lines("/proc/self/uid_map")) {
            known += Long.parseLong(line.strip().split("\\s+")[2]);
        }
        if (known < ALL_USERS) {
            users.remove(STRANGER);
        }
        return users;
    }

    private static long userNumber(String user) {
        if (user.matches("\\d{1,10}")) {
            return Long.parseLong(user);
        }
        return lines("/etc/passwd").stream().map(line -> line.split(":"))
                .filter(fields -> fields.length > 2 && fields[0].equals(user)).map(fields -> Long.parseLong(fields[2]))
                .findFirst().orElseThrow(() -> SeqdedupeException.of("INVALID_CREDENTIALS", "there is no user %s", user));
    }

    /** Returns the users of the listener at a place, and of the socket at that end of this connection to it. */
    private static List<Long> usersAt(InetSocketAddress there, InetSocketAddress here) {
        List<Long> users = new ArrayList<>();
        for (String table : new String[] {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
            for (String line : lines(table)) {
                String[] fields = line.strip().split("\\s+");
                if (fields[0].equals("sl")) {
                    continue;
                }
                InetSocketAddress local = place(fields[1]);
                boolean listens = fields[3].equals("0A") && local.getPort() == there.getPort()
                        && (local.getAddress().isAnyLocalAddress() || local.equals(there));
                if (listens || (local.equals(there) && place(fields[2]).equals(here))) {
                    users.add(Long.parseLong(fields[7]));
                }
            }
        }
        return users;
    }

    /** Parses an address, in words of the machine's byte order, and a port (proc_pid_net(5)). */
    private static InetSocketAddress place(String text) {
        String[] parts = text.split(":");
        byte[] words = HexFormat.of().parseHex(parts[0]);
        ByteBuffer in = ByteBuffer.wrap(words).order(ByteOrder.nativeOrder());
        ByteBuffer out = ByteBuffer.allocate(words.length);
        while (in.hasRemaining()) {
            out.putInt(in.getInt());
        }
        try {
            return new InetSocketAddress(InetAddress.getByAddress(out.array()), Integer.parseInt(parts[1], 16));
        } catch (UnknownHostException e) {
            throw new IllegalStateException(e);
        }
    }

    /** Returns the lines of a file of Linux; none on other systems, where nothing is checked. */
    private static List<String> lines(String file) {
        try {
            return Files.readAllLines(Path.of(file));
        } catch (IOException e) {
            return List.of();
        }
    }
}
