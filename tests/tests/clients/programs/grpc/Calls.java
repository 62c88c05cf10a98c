import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * Unary calls of grpc-java with the retry policy of a service config: Calls ADDRESS calls COUNT | Calls ADDRESS refusals
 *
 * <p>Messages are bytes, so nothing is generated. Each line of the output is the outcome of one call.
 */
final class Calls {
    private static final int WORKERS = 8;
    private static final String SERVICE = "payments.v1.Payments";
    private static final Metadata.Key<String> KEY =
            Metadata.Key.of("idempotency-key", Metadata.ASCII_STRING_MARSHALLER);
    private static final Metadata.Key<byte[]> DETAILS =
            Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
    private static final Pattern REASON = Pattern.compile("IDEMPOTENCY_[A-Z_]+");

    private static final MethodDescriptor.Marshaller<byte[]> BYTES =
            new MethodDescriptor.Marshaller<>() {
                @Override
                public InputStream stream(byte[] message) {
                    return new ByteArrayInputStream(message);
                }

                @Override
                public byte[] parse(InputStream stream) {
                    try {
                        return stream.readAllBytes();
                    } catch (IOException error) {
                        throw new UncheckedIOException(error);
                    }
                }
            };

    private record Outcome(int code, String body) {
        /** A connection that breaks before it is set up is UNKNOWN, with the text "channel closed". */
        boolean isLost() {
            return code == Status.Code.UNAVAILABLE.value() || code == Status.Code.UNKNOWN.value();
        }
    }

    private final ManagedChannel channel;

    private Calls(ManagedChannel channel) {
        this.channel = channel;
    }

    private static MethodDescriptor<byte[], byte[]> method(String name, MethodType type) {
        return MethodDescriptor.newBuilder(BYTES, BYTES)
                .setType(type)
                .setFullMethodName(MethodDescriptor.generateFullMethodName(SERVICE, name))
                .build();
    }

    private static synchronized void report(String name, Outcome outcome) {
        System.out.printf(
                "{\"name\": \"%s\", \"status\": %d, \"body\": \"%s\"}%n", name, outcome.code, outcome.body);
    }

    private static byte[] payment(String account, int amount) {
        byte[] text = account.getBytes(StandardCharsets.US_ASCII);
        byte[] message = new byte[text.length + 4];
        message[0] = 0x0a;
        message[1] = (byte) text.length;
        System.arraycopy(text, 0, message, 2, text.length);
        message[text.length + 2] = 0x10;
        message[text.length + 3] = (byte) amount;
        return message;
    }

    private Channel withKey(String key) {
        Metadata metadata = new Metadata();
        if (key != null) {
            metadata.put(KEY, key);
        }
        return ClientInterceptors.intercept(
                channel, MetadataUtils.newAttachHeadersInterceptor(metadata));
    }

    private Outcome pay(String key, byte[] message) {
        CallOptions options =
                CallOptions.DEFAULT.withWaitForReady().withDeadlineAfter(60, TimeUnit.SECONDS);
        try {
            byte[] reply =
                    ClientCalls.blockingUnaryCall(
                            withKey(key), method("Pay", MethodType.UNARY), options, message);
            return new Outcome(0, HexFormat.of().formatHex(reply));
        } catch (StatusRuntimeException error) {
            byte[] details = error.getTrailers() == null ? null : error.getTrailers().get(DETAILS);
            String text = details == null ? "" : new String(details, StandardCharsets.ISO_8859_1);
            Matcher reason = REASON.matcher(text);
            String body = reason.find() ? reason.group() : error.getStatus().getDescription();
            return new Outcome(error.getStatus().getCode().value(), body);
        }
    }

    /** A call whose attempts are used up is made again with its key, as an application would. */
    private void calls(int count) throws InterruptedException {
        AtomicInteger next = new AtomicInteger();
        AtomicInteger again = new AtomicInteger();
        ExecutorService workers = Executors.newFixedThreadPool(WORKERS);
        for (int worker = 0; worker < WORKERS; worker++) {
            workers.execute(
                    () -> {
                        for (int call = next.incrementAndGet(); call <= count; call = next.incrementAndGet()) {
                            String name = "call-" + call;
                            Outcome outcome = pay(name, payment(name, 5));
                            while (outcome.isLost()) {
                                again.incrementAndGet();
                                outcome = pay(name, payment(name, 5));
                            }
                            report(name, outcome);
                        }
                    });
        }
        workers.shutdown();
        // Otherwise a channel waits for a second before it connects again. The builder has no setting for it.
        while (!workers.awaitTermination(50, TimeUnit.MILLISECONDS)) {
            channel.resetConnectBackoff();
        }
        report("again", new Outcome(again.get(), ""));
    }

    private void stream(String name, String method, List<byte[]> messages) throws InterruptedException {
        CountDownLatch ended = new CountDownLatch(1);
        StringBuilder replies = new StringBuilder();
        AtomicInteger code = new AtomicInteger();
        StreamObserver<byte[]> responses =
                new StreamObserver<>() {
                    @Override
                    public void onNext(byte[] reply) {
                        replies.append(HexFormat.of().formatHex(reply)).append(';');
                    }

                    @Override
                    public void onError(Throwable error) {
                        code.set(Status.fromThrowable(error).getCode().value());
                        ended.countDown();
                    }

                    @Override
                    public void onCompleted() {
                        ended.countDown();
                    }
                };
        StreamObserver<byte[]> requests =
                ClientCalls.asyncBidiStreamingCall(
                        withKey(name).newCall(method(method, MethodType.BIDI_STREAMING), CallOptions.DEFAULT),
                        responses);
        messages.forEach(requests::onNext);
        requests.onCompleted();
        ended.await();
        report(name, new Outcome(code.get(), replies.toString()));
    }

    private void refusals() throws InterruptedException {
        report("definite", pay("definite", payment("definite", 5)));
        report("first", pay("reused", payment("reused", 5)));
        report("reused", pay("reused", payment("reused", 6)));
        report("missing", pay(null, payment("missing", 5)));
        Thread first = new Thread(() -> report("slow", pay("slow", payment("slow", 5))));
        first.start();
        Thread.sleep(200);
        report("slow", pay("slow", payment("slow", 5)));
        first.join();
        stream("watch", "Watch", List.of(new byte[] {0x0a, 1, 'w'}));
        stream("pay-all", "PayAll", Arrays.asList(payment("stream", 5), payment("stream", 6)));
    }

    public static void main(String[] args) throws InterruptedException {
        // The policy retries more codes than it should. The pushback of an error that is final prevents these retries.
        Map<String, ?> policy =
                Map.of(
                        "maxAttempts", 5.0,
                        "initialBackoff", "0.02s",
                        "maxBackoff", "0.5s",
                        "backoffMultiplier", 2.0,
                        "retryableStatusCodes",
                                List.of("UNAVAILABLE", "UNKNOWN", "FAILED_PRECONDITION", "INVALID_ARGUMENT"));
        Map<String, ?> methods =
                Map.of("name", List.of(Map.of("service", SERVICE)), "retryPolicy", policy);
        ManagedChannel channel =
                NettyChannelBuilder.forTarget(args[0])
                        .usePlaintext()
                        .proxyDetector(address -> null)
                        .enableRetry()
                        .defaultServiceConfig(Map.of("methodConfig", List.of(methods)))
                        .build();
        Calls calls = new Calls(channel);
        if (args[1].equals("refusals")) {
            calls.refusals();
        } else {
            calls.calls(Integer.parseInt(args[2]));
        }
        channel.shutdownNow();
    }
}
