import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Prints the exception of a consumer of KIP-848, or of a transactional producer. */
public class Refusals {
    public static void main(String[] arguments) {
        try {
            if (arguments[1].equals("consumer")) {
                consume(arguments[0]);
            } else {
                new KafkaProducer<>(
                    Map.of("bootstrap.servers", arguments[0], "transactional.id", "tx"),
                    new StringSerializer(), new StringSerializer()).initTransactions();
            }
            System.out.println("no exception");
        } catch (KafkaException refusal) {
            System.out.println(refusal);
        }
        System.exit(0);
    }

    private static void consume(String address) {
        var consumer = new KafkaConsumer<>(
            Map.of("bootstrap.servers", address, "group.id", "g", "group.protocol", "consumer"),
            new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of("t"));
        for (int poll = 0; poll < 60; poll++) {
            consumer.poll(Duration.ofSeconds(1));
        }
    }
}
