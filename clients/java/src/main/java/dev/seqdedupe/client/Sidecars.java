package dev.seqdedupe.client;

import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.regex.Pattern;

/**
 * The sidecars in front of one log.
 *
 * @param addresses the addresses that the client tries, in the form in which they are compared
 * @param domains to any host in them, a sidecar may redirect the client
 */
record Sidecars(List<String> addresses, List<String> domains) {
    static final String UNIX = "unix:";
    private static final String LABEL = "[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?";
    private static final Pattern HOST = Pattern.compile(LABEL + "(\\." + LABEL + ")*");
    private static final Pattern LOCAL = Pattern.compile("localhost|127(\\.\\d+){3}|\\[::1]");
    private static final int MAX_PORT = 65_535;

    /** Parses addresses, separated by commas. Throws INVALID_ADDRESS. */
    static Sidecars parse(String given) {
        Set<String> addresses = new LinkedHashSet<>();
        List<String> domains = new ArrayList<>();
        for (String part : given.split(",")) {
            String text = part.strip();
            if (!text.startsWith("*.")) {
                addresses.add(parseAddress(text));
                continue;
            }
            String domain = text.substring(2).toLowerCase(Locale.ROOT);
            // A domain that ends in a number would be part of an IP address.
            if (!HOST.matcher(domain).matches() || domain.substring(domain.lastIndexOf('.') + 1).matches("\\d+")) {
                throw SeqdedupeException.of("INVALID_ADDRESS", "%s is no domain: it should be like *.example.org", text);
            }
            domains.add(domain);
        }
        if (addresses.isEmpty()) {
            throw SeqdedupeException.of("INVALID_ADDRESS", "'%s' contains no sidecar's address", given);
        }
        return new Sidecars(List.copyOf(addresses), domains);
    }

    private static String parseAddress(String text) {
        if (text.startsWith(UNIX) && !text.substring(UNIX.length()).replace("/", "").isEmpty()) {
            return text.startsWith(UNIX + "///") ? UNIX + text.substring(UNIX.length() + 2) : text;
        }
        int colon = text.lastIndexOf(':');
        String host = text.substring(0, Math.max(colon, 0)).toLowerCase(Locale.ROOT);
        String port = text.substring(colon + 1);
        boolean isHost = host.matches("\\[[^]]+]") || (!host.isEmpty() && !host.matches(".*[:/\\[\\]].*"));
        if (!isHost || !port.matches("\\d{1,5}") || Integer.parseInt(port) > MAX_PORT) {
            throw SeqdedupeException.of("INVALID_ADDRESS",
                    "'%s' is no address of a sidecar: it should be host:port or unix:/path", text);
        }
        return host + ":" + Integer.parseInt(port);
    }

    static String host(String address) {
        return address.substring(0, address.lastIndexOf(':'));
    }

    static int port(String address) {
        return Integer.parseInt(address.substring(address.lastIndexOf(':') + 1));
    }

    /** Whether only this machine can reach the address. */
    static boolean isLocal(String address) {
        return address.startsWith(UNIX) || LOCAL.matcher(host(address)).matches();
    }

    boolean isOne() {
        return addresses.size() == 1 && domains.isEmpty();
    }

    /** Returns the addresses in the order in which every client tries them for this topic. */
    List<String> inOrder(String topic) {
        if (topic.isEmpty()) {
            return addresses;
        }
        List<String> order = new ArrayList<>(addresses);
        order.sort((a, b) -> Arrays.compareUnsigned(weight(topic, b), weight(topic, a)));
        return order;
    }

    private static byte[] weight(String topic, String address) {
        try {
            byte[] text = (topic + "\n" + address).getBytes(StandardCharsets.UTF_8);
            return Arrays.copyOf(MessageDigest.getInstance("SHA-256").digest(text), 8);
        } catch (NoSuchAlgorithmException e) {
            throw new IllegalStateException(e);
        }
    }

    /**
     * Returns the address to which a sidecar redirects, or null. The client sends its credentials there, so it goes only
     * to addresses and domains that it was given.
     */
    String allowed(String text) {
        String address;
        try {
            address = parseAddress(text == null ? "" : text);
        } catch (SeqdedupeException e) {
            return null;
        }
        boolean isInDomain = !address.startsWith(UNIX) && HOST.matcher(host(address)).matches()
                && domains.stream().anyMatch(domain -> host(address).endsWith("." + domain));
        return addresses.contains(address) || isInDomain ? address : null;
    }
}
