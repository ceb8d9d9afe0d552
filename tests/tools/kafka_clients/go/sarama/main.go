// sarama makes a topic, produces with each codec, consumes in a group of two members, and
// administers: sarama ADDRESS VERSION. It ends with status 1 at the first thing that is not as it
// should be.
package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

const (
	partitions = 4
	each       = 500
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func check(is bool, format string, values ...any) {
	if !is {
		must(fmt.Errorf(format, values...))
	}
}

func settings(version sarama.KafkaVersion) *sarama.Config {
	config := sarama.NewConfig()
	config.Version = version
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	return config
}

func produce(seed, topic string, version sarama.KafkaVersion) int {
	codecs := []sarama.CompressionCodec{
		sarama.CompressionNone, sarama.CompressionGZIP, sarama.CompressionSnappy,
		sarama.CompressionLZ4,
	}
	if version.IsAtLeast(sarama.V2_1_0_0) {
		codecs = append(codecs, sarama.CompressionZSTD)
	}
	for _, codec := range codecs {
		config := settings(version)
		config.Producer.Compression = codec
		if version.IsAtLeast(sarama.V1_0_0_0) {
			config.Producer.Idempotent = true
			config.Net.MaxOpenRequests = 1
		}
		producer, err := sarama.NewSyncProducer([]string{seed}, config)
		must(err)
		var messages []*sarama.ProducerMessage
		for n := range each {
			messages = append(messages, &sarama.ProducerMessage{
				Topic: topic, Key: sarama.StringEncoder(fmt.Sprint("key-", n)),
				Value:   sarama.StringEncoder(fmt.Sprint(codec, " ", n)),
				Headers: []sarama.RecordHeader{{Key: []byte("h"), Value: []byte("v")}},
			})
		}
		must(producer.SendMessages(messages))
		must(producer.Close())
	}
	return len(codecs) * each
}

type reader struct {
	lock  sync.Mutex
	seen  map[string]bool
	total int
	done  context.CancelFunc
}

func (*reader) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*reader) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (r *reader) ConsumeClaim(
	session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim,
) error {
	for {
		select {
		case message, is := <-claim.Messages():
			if !is {
				return nil
			}
			r.lock.Lock()
			r.seen[string(message.Value)] = true
			if len(r.seen) == r.total {
				r.done()
			}
			r.lock.Unlock()
			session.MarkMessage(message, "")
		case <-session.Context().Done():
			return nil
		}
	}
}

func consume(seed, topic, group string, version sarama.KafkaVersion, total int) {
	ctx, done := context.WithTimeout(context.Background(), time.Minute)
	defer done()
	all := &reader{seen: map[string]bool{}, total: total, done: done}
	var members sync.WaitGroup
	for range 2 {
		members.Add(1)
		go func() {
			defer members.Done()
			member, err := sarama.NewConsumerGroup([]string{seed}, group, settings(version))
			must(err)
			for ctx.Err() == nil {
				must(member.Consume(ctx, []string{topic}, all))
			}
			must(member.Close())
		}()
	}
	members.Wait()
	check(len(all.seen) == total, "%d of %d records read", len(all.seen), total)
}

func configure(admin sarama.ClusterAdmin, topic string) {
	value := "3600000"
	must(admin.AlterConfig(sarama.TopicResource, topic,
		map[string]*string{"retention.ms": &value}, false))
	entries, err := admin.DescribeConfig(sarama.ConfigResource{
		Type: sarama.TopicResource, Name: topic, ConfigNames: []string{"retention.ms"}})
	must(err)
	check(len(entries) == 1 && entries[0].Value == value, "%v", entries)
}

func administer(admin sarama.ClusterAdmin, topic, group string, version sarama.KafkaVersion) {
	committed, err := admin.ListConsumerGroupOffsets(group, map[string][]int32{topic: {0, 1, 2, 3}})
	must(err)
	check(len(committed.Blocks[topic]) == partitions, "%v", committed.Blocks)
	described, err := admin.DescribeConsumerGroups([]string{group})
	must(err)
	check(described[0].State == "Empty", "state %s", described[0].State)
	if version.IsAtLeast(sarama.V1_1_0_0) { // below, DescribeConfigs 0, which Kafka 4 has not
		must(admin.DeleteConsumerGroup(group))
		configure(admin, topic)
	}
	if version.IsAtLeast(sarama.V1_1_0_0) {
		must(admin.CreatePartitions(topic, partitions+2, nil, false))
		topics, err := admin.ListTopics()
		must(err)
		check(topics[topic].NumPartitions == partitions+2, "%v", topics)
	}
	must(admin.DeleteTopic(topic))
}

func main() {
	seed := os.Args[1]
	version, err := sarama.ParseKafkaVersion(os.Args[2])
	must(err)
	topic, group := "sarama-"+os.Args[2], "sarama-group-"+os.Args[2]
	admin, err := sarama.NewClusterAdmin([]string{seed}, settings(version))
	must(err)
	defer admin.Close()
	must(admin.CreateTopic(topic,
		&sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: 1}, false))
	total := produce(seed, topic, version)
	consume(seed, topic, group, version, total)
	administer(admin, topic, group, version)
	fmt.Println("sarama passed")
}
